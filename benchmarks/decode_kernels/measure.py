"""Device times of captured calls, early starts on or off, and what a run reports."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gemray_kernels.triton import early_start

DEVICE = torch.device("cuda")
CACHE_BYTES = 50 << 20
CEILING = 3.06e12
"""Bytes a second of a sum over 2 GiB."""
REPLAYS = 9
CLEARING_S = 4e-3 / (1 << 30)
"""A byte that is given back to the driver: it is cleared, and an H200 reads by 12% more slowly meanwhile."""

Call = Callable[[], object]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, gain: float = 1.0) -> Tensor:
    """Normal numbers: never zeros, which can run faster than data does."""
    return (torch.randn(shape, device=DEVICE, dtype=torch.float32) * gain).to(dtype)


@contextmanager
def early(on: bool) -> Iterator[None]:
    """Let kernels start early, or not."""
    with mock.patch.object(early_start, "_capability", return_value=(9, 0) if on else (0, 0)):
        yield


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill new tensors with NaN, so that an output that a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def median_us(calls: Sequence[Call], replays: int = REPLAYS) -> float:
    """Device time of one of the calls in microseconds; they are captured one after the other."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    given_back = _given_back()
    with torch.cuda.graph(graph):  # which gives back what is cached
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    time.sleep(CLEARING_S * (_given_back() - given_back))
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def _given_back() -> int:
    """Bytes that this process has given back to the driver."""
    return int(torch.cuda.memory_stats()["reserved_bytes.all.freed"])


def error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the expected norm."""
    return float((found.double() - expected).norm() / expected.norm())


def in_words(found: dict[str, float], most: int | None = None) -> str:
    """The fastest of some times, fastest first."""
    return ", ".join(f"{name} {us:.1f}" for name, us in sorted(found.items(), key=lambda item: item[1])[:most])


class Report:
    """What was measured, printed as it comes and kept for the file."""

    def __init__(self) -> None:
        """Nothing measured yet."""
        self.rows: list[dict[str, Any]] = []
        self.faults: list[str] = []

    def row(self, part: str, text: str, **values: Any) -> None:
        """Keep one measurement and print it."""
        self.rows.append({"part": part, **values})
        print(text, flush=True)

    def fault(self, text: str) -> None:
        """Keep a wrong result; the run goes on and ends with 1."""
        self.faults.append(text)
        print("FAULT " + text, flush=True)

    def refused(self, tile: object, reason: Exception) -> None:
        """Record that a tile does not compile or run; a sweep may contain such tiles."""
        self.rows.append({"part": "fault", "tile": str(tile), "fault": str(reason)[:200]})
