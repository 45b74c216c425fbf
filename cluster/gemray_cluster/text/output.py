"""From the engine's deltas to what a client sees: thoughts, answer and calls, trimmed together with ids and
log-probabilities.

The engine ends a sequence at stop ids and budgets; stop strings are found here, token by token, so the same ids give
the same output however the engine's steps grouped them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from gemray_cluster.text.detokenizer import Detokenizer
from gemray_cluster.text.heading import Heading
from gemray_cluster.text.stops import StopMatcher
from gemray_cluster.text.structure import (
    CLOSES_THOUGHT,
    HEADER,
    OPENS_CALL,
    OPENS_THOUGHT,
    QUOTE,
    STRUCTURAL,
    TURNS,
    Structure,
)
from gemray_cluster.text.tool_calls import PREFIX, CallPiece
from gemray_workers.messages import SequenceDelta
from gemray_workers.sampling.token_logprob import TokenLogprob


@dataclass(frozen=True)
class Ending:
    """Why an output ended."""

    reason: Literal["stop_token", "stop_string", "grammar", "length", "tool_call"]
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


@dataclass(frozen=True)
class OutputRules:
    """What a request says of its output's text."""

    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    """Stop strings that are complete before this many tokens are passed over."""
    show_stop: bool = False
    """Whether the text ends behind its stop string instead of before it."""
    show_special: bool = False
    """Whether special tokens are written out; the text is then not taken apart."""


class OutputStream:
    """The output of one request."""

    def __init__(self, detokenizer: Detokenizer, rules: OutputRules, *, open_thought: str | None = None) -> None:
        """`open_thought` is the beginning of a thought that the prompt leaves open."""
        self._detokenizer = detokenizer
        self._show_special = rules.show_special
        self._stops = StopMatcher(
            rules.stops,
            min_tokens=rules.min_tokens,
            # Where all is shown, all strings are looked for in what is shown.
            spells_control=(lambda stop: False) if rules.show_special else detokenizer.spells_control,
            show_match=rules.show_stop,
        )
        self._structure = Structure(open_thought=None if rules.show_special else open_thought)
        self._heading = Heading(HEADER, begun=open_thought or "")
        """The newest thought's or call's: no stop string is looked for there."""
        if open_thought is None or rules.show_special:
            self._heading.end()
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
            self._release("".join((self._stops.flush(), *self._heading.write(rest), *self._heading.end())))
            if stop_token_at is not None and not self._show_special:
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
        was_thought = self._is_thought
        self._count_reasoning(control)
        if control and self._show_special:
            text, control = self._detokenizer.flush() + control, ""
        elif control in STRUCTURAL:  # an unfinished character belongs to what ends here, not to what follows
            text = self._detokenizer.flush()
        else:
            text = self._detokenizer.push(token_id)
        self._num_written += len(text)
        if control in STRUCTURAL:
            self._controls.append((self._num_written, control))
        ends_run = control in STRUCTURAL and control != QUOTE
        hidden, text = self._heading.write(text)
        if ends_run:
            more_hidden, more = self._heading.end()
            hidden, text = hidden + more_hidden, text + more
        if control == OPENS_CALL:
            self._heading = Heading(PREFIX)
        elif control == OPENS_THOUGHT and not was_thought:
            self._heading = Heading(HEADER)
        self._release(self._stops.push(text, control, ends_run=ends_run, hidden=hidden))

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
        if delta.finish not in ("stop_token", "grammar"):
            return Ending("length")
        has_called = self._structure.num_complete_calls > 0
        return Ending("tool_call" if has_called else delta.finish, stop_token_id=delta.matched_stop_id)
