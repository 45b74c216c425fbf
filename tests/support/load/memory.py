"""Resident memory of the server's processes over a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import median

from psutil import Process

SAMPLE_S = 0.5
MIB = 1 << 20


class MemoryOverTime:
    """Samples of each process, in MiB."""

    def __init__(self, processes: Mapping[str, Process]) -> None:
        """No sample yet."""
        self._processes = processes
        self._began = time.monotonic()
        self.samples: list[tuple[float, dict[str, float]]] = []

    def look(self) -> None:
        """Take a sample."""
        now = {name: process.memory_info().rss / MIB for name, process in self._processes.items()}
        self.samples.append((time.monotonic() - self._began, now))

    def medians(self, parts: int) -> list[tuple[float, dict[str, float]]]:
        """(end in seconds, median of each process) of equal parts of the samples."""
        size = max(1, len(self.samples) // parts)
        groups: Sequence[list[tuple[float, dict[str, float]]]] = [
            self.samples[start : start + size] for start in range(0, size * min(parts, len(self.samples)), size)
        ]
        return [
            (group[-1][0], {name: median(sample[name] for _, sample in group) for name in self._processes})
            for group in groups
        ]


@asynccontextmanager
async def watched_memory(processes: Mapping[str, Process]) -> AsyncIterator[MemoryOverTime]:
    """Samples while the block runs."""
    memory = MemoryOverTime(processes)

    async def look() -> None:
        while True:
            memory.look()
            await asyncio.sleep(SAMPLE_S)

    looking = asyncio.create_task(look())
    try:
        yield memory
    finally:
        looking.cancel()
        memory.look()
