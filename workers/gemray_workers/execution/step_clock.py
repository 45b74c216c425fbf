"""How long the parts of a cycle took, without making the host wait for the device.

On CUDA the marks are events on the stream, read once the cycle's ids have been read: by then they have passed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class StepTimes:
    """Seconds on the device (or of the host, on CPU)."""

    draft: float = 0.0
    verify: float = 0.0
    """The target's forward pass and the choice of tokens."""
    gap: float = 0.0
    """From the end of the cycle before to the beginning of this one: the device had nothing to do but copies. 0 where
    no cycle came just before."""


class StepMarks(Protocol):
    """Marks the parts of one cycle; made when it begins."""

    def drafted(self) -> None:
        """Drafts stand in the slot table."""
        ...

    def verified(self) -> None:
        """The target has decided."""
        ...

    def times(self) -> StepTimes:
        """What the cycle took; waits until it is done."""
        ...


class Clock(Protocol):
    """Marks cycle after cycle of one engine."""

    def start(self) -> StepMarks:
        """Begin a cycle."""
        ...

    def rest(self) -> None:
        """Forget the cycle before: there is no work, so the time until the next one is no gap."""
        ...


class HostMarks:
    """Wall time of the host: right where the host computes."""

    def __init__(self, before: HostMarks | None) -> None:
        self._start = self._drafted = self._verified = time.perf_counter()
        self._gap = 0.0 if before is None else self._start - before._verified

    def drafted(self) -> None:
        """End of drafting."""
        self._drafted = time.perf_counter()

    def verified(self) -> None:
        """End of the cycle."""
        self._verified = time.perf_counter()

    def times(self) -> StepTimes:
        """The marks' distances."""
        return StepTimes(self._drafted - self._start, self._verified - self._drafted, self._gap)


class CudaMarks:
    """Events on the current stream."""

    def __init__(self, before: CudaMarks | None) -> None:
        self._start, self._drafted, self._verified = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        self._ended_before = None if before is None else before._verified
        self._start.record()

    def drafted(self) -> None:
        """End of drafting."""
        self._drafted.record()

    def verified(self) -> None:
        """End of the cycle."""
        self._verified.record()

    def times(self) -> StepTimes:
        """The events' distances."""
        self._verified.synchronize()
        gap = 0.0 if self._ended_before is None else self._ended_before.elapsed_time(self._start)
        milliseconds = self._start.elapsed_time(self._drafted), self._drafted.elapsed_time(self._verified), gap
        return StepTimes(*(duration / 1000 for duration in milliseconds))


class HostClock:
    """`HostMarks` in a row."""

    def __init__(self) -> None:
        self._newest: HostMarks | None = None

    def start(self) -> HostMarks:
        """Begin a cycle."""
        self._newest = HostMarks(self._newest)
        return self._newest

    def rest(self) -> None:
        """Forget the cycle before."""
        self._newest = None


class CudaClock:
    """`CudaMarks` in a row."""

    def __init__(self) -> None:
        self._newest: CudaMarks | None = None

    def start(self) -> CudaMarks:
        """Begin a cycle."""
        self._newest = CudaMarks(self._newest)
        return self._newest

    def rest(self) -> None:
        """Forget the cycle before."""
        self._newest = None


def clock_of(device: torch.device) -> Clock:
    """The clock of a device's engine."""
    return CudaClock() if device.type == "cuda" else HostClock()
