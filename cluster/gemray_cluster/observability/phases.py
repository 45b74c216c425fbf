"""The phases of a request in the engine: it waits for a slot, computes its prompt, and decodes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gemray_workers.messages import SequenceDelta


class Phase(Enum):
    """In their order; each begins where the one before ends."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass
class Phases:
    """When each phase of one request began and ended, in seconds of one clock; None for what has not come."""

    submitted: float | None = None
    queue_s: float | None = None
    """As rank 0 measured it."""
    first_token: float | None = None
    newest_token: float | None = None
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""

    def submit(self, now: float) -> None:
        """The request goes to the engine."""
        self.submitted = now

    def advance(self, delta: SequenceDelta, now: float) -> list[Phase]:
        """The engine gave something; the phases that are known to have ended by it. Decoding ends with the request."""
        ended: list[Phase] = []
        if self.queue_s is None and delta.queue_seconds is not None:
            self.queue_s = delta.queue_seconds
            ended.append(Phase.QUEUE)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        if delta.token_ids:
            if self.first_token is None:
                self.first_token = now
                ended.append(Phase.PREFILL)
            self.newest_token = now
        return ended

    def span(self, phase: Phase) -> tuple[float, float] | None:
        """Begin and end of a phase that has begun and that an end is known of."""
        if self.submitted is None:
            return None
        got_slot = self.submitted + (self.queue_s or 0.0)
        begin, end = {
            Phase.QUEUE: (self.submitted, None if self.queue_s is None else got_slot),
            Phase.PREFILL: (got_slot, self.first_token),
            Phase.DECODE: (self.first_token, self.newest_token),
        }[phase]
        return None if begin is None or end is None else (begin, max(begin, end))

    def seconds(self, phase: Phase) -> float | None:
        """How long a phase took."""
        span = self.span(phase)
        return None if span is None else span[1] - span[0]
