"""Where a cycle's time goes: the device's busiest kernels, what the host waited for, and how long the device idled."""

from __future__ import annotations

import time
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gemray_cluster.bench.host_waits import HostWaits

ROWS = 25
BUSIEST = 6
NCCL_KERNEL = "ncclDevKernel"
NCCL_NAME = "nccl:"


class CycleProfile:
    """Records a few cycles of a running engine; then one more, to list the places where the host waits."""

    def __init__(self, device: torch.device, *, first: int, cycles: int) -> None:
        """Record `cycles` cycles after the first `first` ones."""
        on_cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_cuda else [ProfilerActivity.CPU]
        self._profile = profile(activities=activities)
        self._on_cuda = on_cuda
        self._first, self._last = first, first + cycles
        self._began = self._seconds = 0.0
        self._waits = HostWaits()

    def on_step(self, num_decoded: int) -> None:
        """Between steps: start and stop recording."""
        if num_decoded == self._first:
            self._synchronize()
            self._profile.start()
            self._began = time.perf_counter()
        elif num_decoded == self._last:
            self._synchronize()
            self._seconds = time.perf_counter() - self._began
            self._profile.stop()
            if self._on_cuda:
                self._waits.start()
        elif num_decoded == self._last + 1 and self._on_cuda:
            self._waits.stop()

    def write(self, path: Path) -> None:
        """A summary in words, then the profiler's tables."""
        path.parent.mkdir(parents=True, exist_ok=True)
        averages = self._profile.key_averages()
        parts = [self.summary()]
        if self._on_cuda:
            parts.append(averages.table(sort_by="self_cuda_time_total", row_limit=ROWS, max_name_column_width=60))
        parts.append(averages.table(sort_by="self_cpu_time_total", row_limit=ROWS, max_name_column_width=60))
        path.write_text("\n\n".join(parts), encoding="utf-8")

    @cached_property
    def busy_ms(self) -> float | None:
        """Time of a cycle that the device computes; None on CPU.

        Without collectives: most of an NCCL kernel's time is a wait for the other ranks, which is the hosts'.
        """
        return self._a_cycle(covered(self._spans(collectives=False))) if self._on_cuda else None

    @cached_property
    def busiest(self) -> dict[str, float]:
        """Milliseconds of a cycle that the longest kernels take, by their names; empty on CPU."""
        if not self._on_cuda:
            return {}
        lasting: Counter[str] = Counter()
        for event in self._device_events:
            lasting[short_name(event.name)] += event.time_range.end - event.time_range.start
        return {name: self._a_cycle(microseconds) for name, microseconds in lasting.most_common(BUSIEST)}

    def summary(self) -> str:
        """Per cycle: wall time, device busy and idle, launches, and where the host waited."""
        cycles = self._last - self._first
        lines = [f"{cycles} cycles, {1000 * self._seconds / cycles:.3f} ms each (while being profiled)"]
        if self.busy_ms is not None:
            computing, collectives = self._spans(collectives=False), self._spans(collectives=True)
            idle_ms = 1000 * self._seconds / cycles - self._a_cycle(covered(sorted(computing + collectives)))
            lines.append(f"device busy {self.busy_ms:.3f} ms, idle {idle_ms:.3f} ms a cycle")
            lines.append(f"{len(computing) / cycles:.0f} device operations a cycle")
            if collectives:
                lines.append(
                    f"{len(collectives) / cycles:.0f} collectives a cycle, {self._a_cycle(covered(collectives)):.3f} ms"
                    " with their waits for other ranks"
                )
        places = self._waits.places
        lines.append(f"places where the host waits in one cycle, beside its results: {sum(places.values())}")
        lines += [f"  {count} x {place}" for place, count in places.most_common()]
        return "\n".join(lines)

    def _spans(self, *, collectives: bool) -> list[tuple[float, float]]:
        """When the device computed, or was in a collective, in order, once the profile has ended."""
        return sorted(
            (event.time_range.start, event.time_range.end)
            for event in self._device_events
            if event.name.startswith(NCCL_KERNEL) == collectives
        )

    @cached_property
    def _device_events(self) -> list[Any]:
        """Kernels and copies. The profiler also lays torch's own name of a collective over its kernel."""
        profiler: Any = self._profile
        return [
            event
            for event in profiler.events() or ()
            if event.device_type.name == "CUDA" and not event.name.startswith(NCCL_NAME)
        ]

    def _a_cycle(self, microseconds: float) -> float:
        return microseconds / 1000 / (self._last - self._first)

    def _synchronize(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize()


def short_name(kernel: str) -> str:
    """A kernel's name without its template's arguments, which fill lines."""
    return kernel.removeprefix("void ").split("<")[0].split("(")[0].strip()


def covered(spans: list[tuple[float, float]]) -> float:
    """Length covered by sorted spans."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
