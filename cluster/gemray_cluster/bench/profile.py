"""Where a cycle's time goes: the device's busiest kernels, what the host waited for, and how long the device idled."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gemray_cluster.bench.host_waits import HostWaits

ROWS = 25


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
        """Of a cycle, that the device computes; None on CPU."""
        return covered(self._spans) / 1000 / (self._last - self._first) if self._on_cuda else None

    def summary(self) -> str:
        """Per cycle: wall time, device busy and idle, launches, and where the host waited."""
        cycles = self._last - self._first
        lines = [f"{cycles} cycles, {1000 * self._seconds / cycles:.3f} ms each (while being profiled)"]
        if self.busy_ms is not None:
            idle_ms = 1000 * self._seconds / cycles - self.busy_ms
            lines.append(f"device busy {self.busy_ms:.3f} ms, idle {idle_ms:.3f} ms a cycle")
            lines.append(f"{len(self._spans) / cycles:.0f} device operations a cycle")
        places = self._waits.places
        lines.append(f"places where the host waits for the device in one cycle: {sum(places.values())}")
        lines += [f"  {count} x {place}" for place, count in places.most_common()]
        return "\n".join(lines)

    @cached_property
    def _spans(self) -> list[tuple[float, float]]:
        """When the device computed, in order, once the profile has ended."""
        profiler: Any = self._profile
        return sorted(_device_spans(profiler.events() or ()))

    def _synchronize(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize()


def _device_spans(events: Iterable[Any]) -> Iterable[tuple[float, float]]:
    for event in events:
        if event.device_type.name == "CUDA":
            yield event.time_range.start, event.time_range.end


def covered(spans: list[tuple[float, float]]) -> float:
    """Length covered by sorted spans."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
