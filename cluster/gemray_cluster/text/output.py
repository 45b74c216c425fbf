"""From the engine's deltas to what a client sees: text, trimmed together with ids and log-probabilities.

The engine ends a sequence at stop ids and budgets; stop strings are found here, token by token, so the same ids give
the same output however the engine's steps grouped them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gemray_cluster.text.detokenizer import Detokenizer
from gemray_cluster.text.stops import StopMatcher
from gemray_workers.messages import SequenceDelta
from gemray_workers.sampling.token_logprob import TokenLogprob


@dataclass(frozen=True)
class Ending:
    """Why an output ended."""

    reason: Literal["stop_token", "stop_string", "length"]
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True)
class OutputPiece:
    """What one engine step added to an output."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    ending: Ending | None = None
    """With the last piece."""
    is_thought: bool = False
    """Whether the tokens belong to a thought; a piece never holds tokens of both."""

    @property
    def is_empty(self) -> bool:
        """Whether a client would learn nothing from it."""
        return not (self.token_ids or self.text or self.prompt_logprobs)


class OutputStream:
    """The output of one request."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], *, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops, min_tokens=min_tokens, spells_control=detokenizer.spells_control)
        self.num_tokens = 0
        """Tokens given to the client so far."""

    def push(self, delta: SequenceDelta, *, is_thought: bool = False) -> OutputPiece:
        """Take the next delta (its `finish` is None, stop_token or length). After a piece with `ending` no more follow.

        A stop string ends the output at the token that completes it, whatever the delta holds behind that token.
        """
        stop_token_at = len(delta.token_ids) - 1 if delta.finish == "stop_token" else None
        text = ""
        ending: Ending | None = None
        count = 0
        for index, token_id in enumerate(delta.token_ids):
            count += 1
            if index == stop_token_at:
                break  # the stop token itself is not shown
            text += self._stops.push(self._detokenizer.push(token_id), self._detokenizer.control_of(token_id))
            if self._stops.matched is not None:
                ending = Ending("stop_string", stop_string=self._stops.matched)
                break
        if ending is None and delta.finish is not None:
            text += self._stops.flush() + self._detokenizer.flush()
            ending = _engine_ending(delta)
        self.num_tokens += count
        return OutputPiece(
            token_ids=delta.token_ids[:count],
            text=text,
            logprobs=(delta.logprobs or [])[:count],
            prompt_logprobs=delta.prompt_logprobs or [],
            ending=ending,
            is_thought=is_thought,
        )


def _engine_ending(delta: SequenceDelta) -> Ending:
    if delta.finish == "stop_token":
        return Ending("stop_token", stop_token_id=delta.matched_stop_id)
    return Ending("length")
