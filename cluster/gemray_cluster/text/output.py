"""From the engine's deltas to what a client sees: thoughts, answer and calls, trimmed together with ids and
log-probabilities.

The engine ends a sequence at stop ids and budgets; stop strings are found here, token by token, so the same ids give
the same output however the engine's steps grouped them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gemray_cluster.text.detokenizer import Detokenizer
from gemray_cluster.text.stops import StopMatcher
from gemray_cluster.text.structure import CLOSES_THOUGHT, OPENS_THOUGHT, QUOTE, STRUCTURAL, TURNS, Structure
from gemray_cluster.text.tool_calls import CallPiece
from gemray_workers.messages import SequenceDelta
from gemray_workers.sampling.token_logprob import TokenLogprob


@dataclass(frozen=True)
class Ending:
    """Why an output ended."""

    reason: Literal["stop_token", "stop_string", "length", "tool_call"]
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True)
class OutputPiece:
    """What one engine step added to an output."""

    token_ids: list[int]
    text: str
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    ending: Ending | None = None
    """With the last piece."""

    @property
    def is_empty(self) -> bool:
        """Whether a client would learn nothing from it."""
        return not (self.token_ids or self.text or self.reasoning or self.calls or self.prompt_logprobs)


class OutputStream:
    """The output of one request."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], *, min_tokens: int, open_thought: str | None = None
    ) -> None:
        """`open_thought` is the beginning of a thought that the prompt leaves open."""
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops, min_tokens=min_tokens, spells_control=detokenizer.spells_control)
        self._structure = Structure(open_thought=open_thought)
        self._controls: deque[tuple[int, str]] = deque()
        """Control tokens that wait for the text before them, which a stop string may hold back; each with its length
        from the output's beginning."""
        self._num_written = 0
        self._num_released = 0
        """Characters of the output so far, and those of them that no stop string can take back."""
        self._is_thought = open_thought is not None
        self.num_tokens = 0
        """Tokens given to the client so far."""
        self.num_reasoning_tokens = 0
        """Those of them that belong to a thought, its channel tokens too."""

    def push(self, delta: SequenceDelta) -> OutputPiece:
        """Take the next delta (its `finish` is None, stop_token or length). After a piece with `ending` no more follow.

        A stop string ends the output at the token that completes it, whatever the delta holds behind that token.
        """
        stop_token_at = len(delta.token_ids) - 1 if delta.finish == "stop_token" else None
        ending: Ending | None = None
        count = 0
        for index, token_id in enumerate(delta.token_ids):
            count += 1
            if index == stop_token_at:
                break  # the stop token itself is not shown
            self._take(token_id)
            if self._stops.matched is not None:
                ending = Ending("stop_string", stop_string=self._stops.matched)
                break
        if ending is None and delta.finish is not None:
            rest = self._detokenizer.flush()
            self._num_written += len(rest)
            self._release(self._stops.flush() + rest)
            if stop_token_at is not None:
                self._structure.control(self._detokenizer.control_of(delta.token_ids[-1]))  # it may end a call
            ending = self._engine_ending(delta)
        if ending is not None:
            self._structure.finish()
        self.num_tokens += count
        parts = self._structure.take()
        return OutputPiece(
            token_ids=delta.token_ids[:count],
            text=parts.text,
            reasoning=parts.reasoning,
            calls=parts.calls,
            logprobs=(delta.logprobs or [])[:count],
            prompt_logprobs=delta.prompt_logprobs or [],
            ending=ending,
        )

    def _take(self, token_id: int) -> None:
        control = self._detokenizer.control_of(token_id)
        is_structural = control in STRUCTURAL
        # An unfinished character belongs to what ends here, not to what follows.
        text = self._detokenizer.flush() if is_structural else self._detokenizer.push(token_id)
        self._num_written += len(text)
        if is_structural:
            self._controls.append((self._num_written, control))
        self._count_reasoning(control)
        self._release(self._stops.push(text, control, ends_run=is_structural and control != QUOTE))

    def _count_reasoning(self, control: str) -> None:
        self._is_thought = (self._is_thought or control == OPENS_THOUGHT) and control not in TURNS
        self.num_reasoning_tokens += self._is_thought
        self._is_thought = self._is_thought and control != CLOSES_THOUGHT

    def _release(self, text: str) -> None:
        """Take text apart that no stop string holds back any more, with the control tokens in it."""
        while self._controls and self._controls[0][0] <= self._num_released + len(text):
            at, control = self._controls.popleft()
            length = at - self._num_released
            self._structure.write(text[:length])
            self._structure.control(control)
            text, self._num_released = text[length:], at
        self._structure.write(text)
        self._num_released += len(text)

    def _engine_ending(self, delta: SequenceDelta) -> Ending:
        if delta.finish != "stop_token":
            return Ending("length")
        has_called = self._structure.num_complete_calls > 0
        return Ending("tool_call" if has_called else "stop_token", stop_token_id=delta.matched_stop_id)
