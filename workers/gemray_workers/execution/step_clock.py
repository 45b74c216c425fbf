"""How long the parts of a cycle took, without making the host wait for the device, and whether the times are usable.

On CUDA the marks are events on the stream, read once the cycle's ids have been read: by then they have passed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from gemray_workers.execution.compiled_programs import compiled_programs


@dataclass(frozen=True)
class StepTimes:
    """Seconds on the device (or of the host, on CPU)."""

    draft: float = 0.0
    verify: float = 0.0
    """The target's forward pass and the choice of tokens."""
    gap: float = 0.0
    """From the end of the cycle before to the beginning of this one: the device had nothing to do but copies. 0 where
    no cycle came just before."""
    compiled: bool = False
    """Whether a Triton program was compiled while the cycle was enqueued: then its time is not that of such cycles."""


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
        self._compiling = _Compiling()
        self._start = self._drafted = self._verified = time.perf_counter()
        self._gap = 0.0 if before is None else self._start - before._verified

    def drafted(self) -> None:
        """End of drafting."""
        self._drafted = time.perf_counter()

    def verified(self) -> None:
        """End of the cycle."""
        self._verified = time.perf_counter()
        self._compiling.end()

    def times(self) -> StepTimes:
        """Times between the marks."""
        draft, verify = self._drafted - self._start, self._verified - self._drafted
        return StepTimes(draft, verify, self._gap, self._compiling.happened)


class CudaMarks:
    """Events on the current stream."""

    def __init__(self, before: CudaMarks | None) -> None:
        self._compiling = _Compiling()
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
        self._compiling.end()

    def times(self) -> StepTimes:
        """Times between the events."""
        self._verified.synchronize()
        gap = 0.0 if self._ended_before is None else self._ended_before.elapsed_time(self._start)
        draft, verify = self._start.elapsed_time(self._drafted), self._drafted.elapsed_time(self._verified)
        return StepTimes(draft / 1000, verify / 1000, gap / 1000, self._compiling.happened)


class _Compiling:
    """Whether programs were compiled between its making and its end: on the host, while kernels are enqueued."""

    def __init__(self) -> None:
        self._programs = compiled_programs()
        self._before = self._after = self._programs.count

    def end(self) -> None:
        self._after = self._programs.count

    @property
    def happened(self) -> bool:
        return self._after > self._before


class HostClock:
    """Makes `HostMarks` for one cycle after another."""

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
    """Makes `CudaMarks` for one cycle after another."""

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
