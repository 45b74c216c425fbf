"""Rank 0's inbox in a benchmark: feeds a batch, times its steps, and says when it has seen enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from gemray_workers.errors import GemrayError
from gemray_workers.messages import FromGang, StepOutput, Stop, Submit, ToGang

OnStep = Callable[[int], None]
"""Called after each step in which the whole batch decoded, with how many there have been."""


class MeasurementFailed(GemrayError):
    """An engine gave something that cannot be measured; it can go on with other work."""


@dataclass(frozen=True)
class Step:
    """One step of the whole batch."""

    seconds: float
    draft: float
    verify: float
    gap: float
    """Seconds of the device between the cycle before and this one."""
    num_tokens: int
    rounds: tuple[int, ...] = ()
    """How many sequences each drafter drafted for in this step."""


class MeasuringInbox:
    """Runs one batch until `steps` decode steps were seen after the warm-up, or all have begun and one has ended."""

    def __init__(
        self,
        submits: Sequence[Submit],
        *,
        warm_up_steps: int = 0,
        steps: int = 0,
        on_step: OnStep | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._submits = list(submits)
        self._warm_up_steps = warm_up_steps
        self._last_step = warm_up_steps + steps
        self._on_step = on_step
        self._clock = clock
        self._started: set[str] = set()
        self._num_decoded = 0
        self._over = self._told_to_stop = self._has_ended = False
        self._fault: str | None = None
        self._began = self._previous = 0.0
        self._draft = self._verify = self._gap = 0.0
        self._rounds: tuple[int, ...] = ()
        self.prefill_seconds = 0.0
        self.steps: list[Step] = []

    def require_sound(self) -> None:
        """Raise MeasurementFailed when a request ended by a fault. `send` does not: a run ends on all ranks alike."""
        if self._fault is not None:
            raise MeasurementFailed(self._fault)

    def poll(self, timeout_s: float) -> list[ToGang]:
        """The batch, then nothing, then `Stop`."""
        if self._began == 0.0:
            self._began = self._clock()
            return list(self._submits)
        if self._over and not self._told_to_stop:
            self._told_to_stop = True
            return [Stop()]
        return []

    def send(self, message: FromGang) -> None:
        """Note when the step ended and what it gave."""
        now = self._clock()
        if not isinstance(message, StepOutput) or self._told_to_stop:
            return
        for delta in message.deltas:
            if delta.fault is not None:
                self._fault = f"request {delta.request_id} ended: {delta.fault}"
        decoded = len(self._started) == len(self._submits)
        self._started |= {delta.request_id for delta in message.deltas if delta.token_ids or delta.finish is not None}
        if not decoded and len(self._started) == len(self._submits):
            self.prefill_seconds = now - self._began
        self._has_ended |= any(delta.finish is not None for delta in message.deltas)
        if self._fault is not None or (self._has_ended and len(self._started) == len(self._submits)):
            self._over = True
        if decoded and not self._over:
            self._note(message, now)
        # What the hook costs belongs to no step.
        self._previous = self._clock()
        self._draft, self._verify = message.stats.draft_seconds, message.stats.verify_seconds
        self._gap = message.stats.gap_seconds
        self._rounds = _rounds(message)

    def _note(self, message: StepOutput, now: float) -> None:
        self._num_decoded += 1
        if self._num_decoded > self._warm_up_steps:
            self.steps.append(
                Step(
                    now - self._previous,
                    message.stats.draft_seconds - self._draft,
                    message.stats.verify_seconds - self._verify,
                    message.stats.gap_seconds - self._gap,
                    sum(len(delta.token_ids) for delta in message.deltas),
                    tuple(now - then for now, then in zip_longest(_rounds(message), self._rounds, fillvalue=0)),
                )
            )
        self._over = self._num_decoded >= self._last_step
        if self._on_step is not None:
            self._on_step(self._num_decoded)


def _rounds(message: StepOutput) -> tuple[int, ...]:
    return tuple(drafter.rounds for drafter in message.stats.speculation.by_drafter)
