"""How long the parts of a step took, without making the host wait for the device.

On CUDA the marks are events on the stream; the step reads the accepted ids anyway, and by then every earlier mark
has passed.
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


class StepClock(Protocol):
    """Marks the parts of one step after the other."""

    def start(self) -> None:
        """The step begins to draft."""
        ...

    def drafted(self) -> None:
        """Drafts stand in the slot table."""
        ...

    def verified(self) -> StepTimes:
        """The accepted ids have been read: what the step took."""
        ...


class HostClock:
    """Wall time of the host: right where the host computes."""

    def __init__(self) -> None:
        self._start = self._drafted = 0.0

    def start(self) -> None:
        """Begin."""
        self._start = time.perf_counter()

    def drafted(self) -> None:
        """End of drafting."""
        self._drafted = time.perf_counter()

    def verified(self) -> StepTimes:
        """End of the step."""
        return StepTimes(self._drafted - self._start, time.perf_counter() - self._drafted)


class CudaClock:
    """Events on the current stream."""

    def __init__(self) -> None:
        self._start, self._drafted, self._verified = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )

    def start(self) -> None:
        """Begin."""
        self._start.record()

    def drafted(self) -> None:
        """End of drafting."""
        self._drafted.record()

    def verified(self) -> StepTimes:
        """End of the step; this event alone may still be a moment away."""
        self._verified.record()
        self._verified.synchronize()
        milliseconds = self._start.elapsed_time(self._drafted), self._drafted.elapsed_time(self._verified)
        return StepTimes(milliseconds[0] / 1000, milliseconds[1] / 1000)


def step_clock(device: torch.device) -> StepClock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
