"""How long one piece of work takes on a device, without what it costs the host to ask for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch

RUNS = 8
WARM_UP_RUNS = 2
IN_A_ROW = 4
WARM_UP_SHARE = 0.2


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work`, the median of several runs after two that are not counted."""
    if device.type == "cuda":
        seconds = [_among_several(work, device) for _ in range(RUNS)]
    else:
        seconds = [_mean_seconds(work, device, 1) for _ in range(RUNS)]
    return median(seconds[WARM_UP_RUNS:])


def sustained_seconds(work: Callable[[], object], device: torch.device, burst_s: float, lasting_s: float) -> float:
    """Mean seconds of `work` over `lasting_s` of nothing else, after a fifth of that which is not counted.

    Args:
        work: enqueued again and again, without a wait in between.
        device: that runs it.
        burst_s: what it takes at best, as of `median_seconds`.
        lasting_s: of the measurement, at least.
    """
    num_runs = math.ceil(lasting_s / burst_s)
    for _ in range(math.ceil(num_runs * WARM_UP_SHARE)):
        work()
    return _mean_seconds(work, device, num_runs)


def _among_several(work: Callable[[], object], device: torch.device) -> float:
    """Time of one among several in a row.

    The first keeps the device busy while the host enqueues the rest: a slow host must not look like a slow device.
    """
    torch.cuda.current_stream(device).synchronize()  # other streams may be busy for long
    work()
    return _mean_seconds(work, device, IN_A_ROW)


def _mean_seconds(work: Callable[[], object], device: torch.device, num_runs: int) -> float:
    """Time of one of so many in a row, by events on a CUDA device, else by the host's clock."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(num_runs):
            work()
        return (time.perf_counter() - started) / num_runs
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    for _ in range(num_runs):
        work()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1000 / num_runs
