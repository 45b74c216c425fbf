"""How long one piece of work takes on a device, without what it costs the host to ask for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

RUNS = 8
WARM_UP_RUNS = 2
IN_A_ROW = 4


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work`, the median of several runs after two that are not counted."""
    timed = _cuda_seconds if device.type == "cuda" else _host_seconds
    seconds = [timed(work, device) for _ in range(RUNS)]
    return median(seconds[WARM_UP_RUNS:])


def _host_seconds(work: Callable[[], object], _device: torch.device) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _cuda_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time of one among several in a row, by events on the device.

    The first keeps the device busy while the host enqueues the rest: a slow host must not look like a slow device.
    """
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    work()
    before.record()
    for _ in range(IN_A_ROW):
        work()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1000 / IN_A_ROW
