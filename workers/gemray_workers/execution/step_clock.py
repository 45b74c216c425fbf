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


class HostMarks:
    """Wall time of the host: right where the host computes."""

    def __init__(self) -> None:
        self._start = self._drafted = self._verified = time.perf_counter()

    def drafted(self) -> None:
        """End of drafting."""
        self._drafted = time.perf_counter()

    def verified(self) -> None:
        """End of the cycle."""
        self._verified = time.perf_counter()

    def times(self) -> StepTimes:
        """The marks' distances."""
        return StepTimes(self._drafted - self._start, self._verified - self._drafted)


class CudaMarks:
    """Events on the current stream."""

    def __init__(self) -> None:
        self._start, self._drafted, self._verified = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
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
        milliseconds = self._start.elapsed_time(self._drafted), self._drafted.elapsed_time(self._verified)
        return StepTimes(milliseconds[0] / 1000, milliseconds[1] / 1000)


def start_marks(device: torch.device) -> StepMarks:
    """Begin a cycle on a device."""
    return CudaMarks() if device.type == "cuda" else HostMarks()
