"""Where a setup's time goes on a rank: lap after lap, with what compiling and capturing took of each."""

from __future__ import annotations

import time
from collections.abc import Callable

from gemray_cluster.bench.report import Spent
from gemray_workers.engine.graphs import Captures
from gemray_workers.execution.compiled_programs import compiled_programs


class Laps:
    """A clock that is read at the end of each part of a setup's work."""

    def __init__(self, name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin; `name` is the setup's."""
        self._name = name
        self._clock = clock
        self._programs = compiled_programs()
        self._reading = self._read(Captures())

    def lap(self, what: str, captures: Captures) -> Spent:
        """What has been spent since the lap before; `captures` counts from the setup's beginning."""
        before = self._reading
        self._reading = now = self._read(captures)
        seconds, programs, compiling_s, graphs, capturing_s = (b - a for a, b in zip(before, now, strict=True))
        return Spent(
            name=self._name,
            what=what,
            seconds=seconds,
            programs=int(programs),
            compiling_s=compiling_s,
            graphs=int(graphs),
            capturing_s=capturing_s,
        )

    def _read(self, captures: Captures) -> tuple[float, ...]:
        programs = self._programs
        return self._clock(), programs.count, programs.seconds, captures.count, captures.seconds
