"""Where the host waits for the device: torch's own watch over its synchronizing calls, as a list of places."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import torch


class HostWaits:
    """Watches from `start` to `stop`. Waits that torch does not know of (for an event, in NCCL) are not seen."""

    def __init__(self) -> None:
        self._catch = warnings.catch_warnings(record=True)
        self._caught: list[warnings.WarningMessage] = []
        self.places: Counter[str] = Counter()
        """``file:line`` of each wait, after `stop`."""

    def start(self) -> None:
        """Begin to watch, in the thread that is watched."""
        caught = self._catch.__enter__()
        assert caught is not None, "catch_warnings(record=True) gives a list"
        self._caught = caught
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def stop(self) -> None:
        """End the watch."""
        torch.cuda.set_sync_debug_mode("default")
        self.places.update(
            f"{Path(w.filename).name}:{w.lineno}" for w in self._caught if "called a synchronizing" in str(w.message)
        )
        self._catch.__exit__(None, None, None)
