"""Rank 0's inbox under a load: hands requests over when they arrive, and notes when their tokens come."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from gemray_cluster.bench.answers import Answer
from gemray_workers.messages import FromGang, StepOutput, Stop, Submit, ToGang


class RateInbox:
    """Runs a load to its end."""

    def __init__(
        self,
        submits: Sequence[tuple[float, Submit]],
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`submits`: each with the seconds after which it arrives, in that order."""
        self._coming = deque(submits)
        self._clock, self._sleep = clock, sleep
        self._began: float | None = None
        self._open: set[str] = set()
        self.answers: dict[str, Answer] = {submit.request_id: Answer(at_s) for at_s, submit in submits}

    def poll(self, timeout_s: float) -> list[ToGang]:
        """What has arrived; waits for a first request, at most `timeout_s`; `Stop` when all have ended."""
        now = self._now()
        if not self._coming and not self._open:
            return [Stop()]
        if self._coming and timeout_s > 0:
            self._sleep(min(timeout_s, max(0.0, self._coming[0][0] - now)))
            now = self._now()
        arrived: list[ToGang] = []
        while self._coming and self._coming[0][0] <= now:
            _, submit = self._coming.popleft()
            self._open.add(submit.request_id)
            arrived.append(submit)
        return arrived

    def send(self, message: FromGang) -> None:
        """Note whose tokens came, and when."""
        now = self._now()
        if not isinstance(message, StepOutput):
            return
        for delta in message.deltas:
            answer = self.answers[delta.request_id]
            if delta.token_ids:
                answer.messages.append((now, len(delta.token_ids)))
            if delta.fault is not None:
                answer.refusal = delta.fault
            if delta.finish is not None:
                self._open.discard(delta.request_id)

    def _now(self) -> float:
        """Seconds since the first poll."""
        if self._began is None:
            self._began = self._clock()
        return self._clock() - self._began
