"""How long the parts of a rank's load took, lap after lap."""

from __future__ import annotations

import time
from collections.abc import Callable

from gemray_workers.engine.graphs import Captures
from gemray_workers.execution.compiled_programs import CompiledPrograms


class LoadLaps:
    """Times the parts of a load, of which compiling and capturing are two of their own, wherever they happen.

    They are the host's times: what a card still computes when a lap ends is waited for in a later one.
    """

    def __init__(
        self,
        programs: CompiledPrograms,
        captures: Callable[[], Captures],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin the first lap.

        Args:
            programs: the process's.
            captures: what capturing has cost the rank so far.
            clock: in seconds.
        """
        self._programs = programs
        self._captures = captures
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._reading = self._read()

    @property
    def seconds(self) -> dict[str, float]:
        """Each part's, in the order in which they began; they add up to the time that the laps took."""
        return dict(self._seconds)

    def end(self, name: str, *, within: dict[str, float] | None = None) -> None:
        """End a lap, and begin the next one.

        Args:
            name: of the lap; several may have the same.
            within: parts of the lap that are told by names of their own.
        """
        before, self._reading = self._reading, self._read()
        whole, compiling, graphs = (now - then for now, then in zip(self._reading, before, strict=True))
        apart = {**(within or {}), "compiling": compiling, "graphs": graphs}
        for part, seconds in ({name: max(0.0, whole - sum(apart.values()))} | apart).items():
            if seconds or part == name:
                self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def _read(self) -> tuple[float, float, float]:
        return self._clock(), self._programs.seconds, self._captures().seconds
