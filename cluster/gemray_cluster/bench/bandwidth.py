"""How fast a device reads its memory."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor

BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
RUNS = 8
WARM_UP_RUNS = 2
SUMS_IN_A_ROW = 4


class BandwidthProbe:
    """The fastest that a process has seen each of its devices read.

    Setup after setup in one process, the same sum has measured 3.11 and 2.61 TB/s of one H100, for a reason not found.
    A floor is of the device at its best.
    """

    def __init__(self) -> None:
        self._best: dict[torch.device, float] = {}

    def read(self, device: torch.device) -> float:
        """Probe again; the best so far, in bytes a second."""
        self._best[device] = max(self._best.get(device, 0.0), read_bandwidth(device))
        return self._best[device]


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of summing a large tensor, the median of several runs."""
    x = torch.ones(BYTES[device.type] // 4, dtype=torch.float32, device=device)
    timed = _cuda_seconds if device.type == "cuda" else _host_seconds
    seconds = [timed(x) for _ in range(RUNS)]
    return x.nbytes / median(seconds[WARM_UP_RUNS:])


def _host_seconds(x: Tensor) -> float:
    started = time.perf_counter()
    x.sum()
    return time.perf_counter() - started


def _cuda_seconds(x: Tensor) -> float:
    """Time of one sum among several in a row, by events on the device.

    The first sum keeps the device busy while the host enqueues the rest: a slow host must not look like slow memory.
    """
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(x.device)
    x.sum()
    before.record()
    for _ in range(SUMS_IN_A_ROW):
        x.sum()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1000 / SUMS_IN_A_ROW
