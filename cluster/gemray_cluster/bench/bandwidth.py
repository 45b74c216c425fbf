"""How fast a device reads its memory."""

from __future__ import annotations

import time
from statistics import median

import torch

BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of summing a large tensor, the median of several runs."""
    x = torch.ones(BYTES[device.type] // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(8):
        started = _now(device)
        x.sum()
        seconds.append(_now(device) - started)
    return x.nbytes / median(seconds[2:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
