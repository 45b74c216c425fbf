"""How long the parts of a start took, for one line of the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Laps:
    """Measures the time between calls, the first from when it was made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self._laps: list[tuple[str, float]] = []

    def end(self, name: str) -> None:
        """Record the time since the last call under `name`."""
        now = self._clock()
        self._laps.append((name, now - self._last))
        self._last = now

    def __str__(self) -> str:
        """The whole and its parts: ``12.5 s: placement 0.5, processes 7.0, load 5.0``."""
        return f"{self._last - self._began:.1f} s: {in_parts(dict(self._laps))}"


def in_parts(seconds: Mapping[str, float]) -> str:
    """What parts took, in seconds."""
    return ", ".join(f"{name} {part:.1f}" for name, part in seconds.items())
