"""The least free memory of a device while something runs."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from gemray_workers.rank.memory import free_bytes

_EVERY_S = 0.02


class FreeMemoryWatch:
    """Looks at a device's free memory from a thread of its own, as long as the block runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.least = free_bytes(device)

    def __enter__(self) -> FreeMemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        self._note()

    def _look(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._note()

    def _note(self) -> None:
        self.least = min(self.least, free_bytes(self._device))
