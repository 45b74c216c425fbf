"""Where a cycle's time goes: the device's busiest kernels, what the host waited for, and how long the device idled."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

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
        self._waits: list[warnings.WarningMessage] = []
        self._catch: warnings.catch_warnings[list[warnings.WarningMessage]] | None = None

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
            self._watch_waits()
        elif num_decoded == self._last + 1:
            self._end_watch()

    def write(self, path: Path) -> None:
        """A summary in words, then the profiler's tables."""
        path.parent.mkdir(parents=True, exist_ok=True)
        averages = self._profile.key_averages()
        parts = [self.summary()]
        if self._on_cuda:
            parts.append(averages.table(sort_by="self_cuda_time_total", row_limit=ROWS, max_name_column_width=60))
        parts.append(averages.table(sort_by="self_cpu_time_total", row_limit=ROWS, max_name_column_width=60))
        path.write_text("\n\n".join(parts), encoding="utf-8")

    def summary(self) -> str:
        """Per cycle: wall time, device busy and idle, launches, and where the host waited."""
        cycles = self._last - self._first
        lines = [f"{cycles} cycles, {1000 * self._seconds / cycles:.3f} ms each (while being profiled)"]
        if self._on_cuda:
            spans = sorted(_device_spans(self._events()))
            busy_us, launches = _union(spans), len(spans)
            idle = 1000 * self._seconds - busy_us / 1000
            lines.append(f"device busy {busy_us / 1000 / cycles:.3f} ms, idle {idle / cycles:.3f} ms a cycle")
            lines.append(f"{launches / cycles:.0f} device operations a cycle")
        places = Counter(f"{w.filename}:{w.lineno}" for w in self._waits)
        lines.append(f"places where the host waits for the device in one cycle: {sum(places.values())}")
        lines += [f"  {count} x {place}" for place, count in places.most_common()]
        return "\n".join(lines)

    def _events(self) -> Iterable[Any]:
        profiler: Any = self._profile
        return profiler.events() or ()

    def _watch_waits(self) -> None:
        if not self._on_cuda:
            return
        self._catch = warnings.catch_warnings(record=True)
        caught = self._catch.__enter__()
        assert caught is not None  # record=True
        self._waits = caught
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def _end_watch(self) -> None:
        if self._catch is None:
            return
        torch.cuda.set_sync_debug_mode("default")
        self._waits = [w for w in self._waits if "synchroniz" in str(w.message)]
        self._catch.__exit__(None, None, None)
        self._catch = None

    def _synchronize(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize()


def _device_spans(events: Iterable[Any]) -> Iterable[tuple[float, float]]:
    for event in events:
        if event.device_type.name == "CUDA":
            yield event.time_range.start, event.time_range.end


def _union(spans: list[tuple[float, float]]) -> float:
    """Length covered by sorted spans."""
    covered, reached = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
