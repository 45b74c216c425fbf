"""What rank 0 observes of steps and requests, for histograms of those who watch."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from gemray_workers.messages import BATCH_SIZE_BOUNDS, STEP_SECONDS_BOUNDS, Distribution, SequenceDelta
from gemray_workers.scheduling.plan import StepPlan


class DistributionTally:
    """Counts values between bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """No value yet; `bounds` rise."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value: one that equals a bound is not above it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def distribution(self) -> Distribution:
        """The counts so far."""
        return Distribution(counts=list(self._counts), total=self._total)


class StepObserver:
    """Durations of steps and how many sequences they have."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """No step yet; `clock` gives seconds."""
        self._clock = clock
        self._since = clock()
        self.seconds = DistributionTally(STEP_SECONDS_BOUNDS)
        self.batch_sizes = DistributionTally(BATCH_SIZE_BOUNDS)

    def begin(self) -> None:
        """The wait for work is over; the time of a step begins."""
        self._since = self._clock()

    def commit(self, plan: StepPlan) -> None:
        """A step was committed. With lag 1 that is the one before the one that began: in a row of steps each takes as
        long as there is from commit to commit, waits for work left out.
        """
        now = self._clock()
        if plan.scheduled:
            self.seconds.observe(now - self._since)
            self.batch_sizes.observe(len(plan.scheduled))
        self._since = now


class QueueObserver:
    """How long requests wait for their slots."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """No request yet; `clock` gives seconds."""
        self._clock = clock
        self._arrived: dict[str, float] = {}
        self._waited: dict[str, float] = {}

    def arrive(self, request_id: str) -> None:
        """A request is there."""
        self._arrived.setdefault(request_id, self._clock())

    def admit(self, plan: StepPlan) -> None:
        """Requests got their slots; again, after a preemption, does not count."""
        for admission in plan.admitted:
            arrived = self._arrived.pop(admission.request_id, None)
            if arrived is not None:
                self._waited[admission.request_id] = self._clock() - arrived

    def take_wait(self, delta: SequenceDelta) -> float | None:
        """Seconds that a request waited, to be told with its first delta; None where there is nothing to tell."""
        if delta.finish is not None:
            self._arrived.pop(delta.request_id, None)
        return self._waited.pop(delta.request_id, None)
