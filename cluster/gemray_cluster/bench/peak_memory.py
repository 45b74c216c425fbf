"""The most memory of a device that a setup took, without what measuring took meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PeakMemory:
    """Counts from its making on; on CPU there is nothing to count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._before = 0
        self._restart()

    @property
    def bytes(self) -> int:
        """The peak so far."""
        now = 0 if self._device is None else torch.cuda.max_memory_allocated(self._device)
        return max(self._before, now)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is allocated and freed within does not count."""
        self._before = self.bytes
        yield
        self._restart()

    def _restart(self) -> None:
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
