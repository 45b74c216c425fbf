"""What a device can do at best: how fast it reads its memory, how fast its matrix units multiply."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gemray_cluster.bench.timing import median_seconds, sustained_seconds

BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
PRODUCT = {"cuda": (4096, 8192, 8192), "cpu": (256, 512, 512)}
"""Rows, inner width and columns: on a card, of the size of a chunk of prompt through a large layer."""
ROWS = (1024, 2048, 4096)
"""Rows in which the bytes are also summed: each is read from end to end by one block of threads."""
LASTING_S = {"cuda": 1.0, "cpu": 0.02}
CLEARED_S = {"cuda": 0.5, "cpu": 0.0}
"""Longer than a driver takes to clear all memory of a card that was freed, 2.3 ms a GiB on an H200. Meanwhile memory is
read more slowly, there by 12%."""


@dataclass(frozen=True)
class ReadRates:
    """Bytes a second that a device reads."""

    best: float
    """The fastest of several ways to read."""
    sum: float
    """A sum over all of a large tensor, by which peers' floors and bars were stated."""


@dataclass(frozen=True)
class MatrixRates:
    """Operations a second of large products, a multiplication and an addition counted as two."""

    burst: float
    """What a few products reach."""
    sustained: float
    """What a second of nothing else reaches, for which a card at its limit of power lowers its clock."""


class Probes:
    """The best rates that this process has measured on each of its devices."""

    def __init__(self) -> None:
        self._best: dict[tuple[object, ...], float] = {}

    def read_rates(self, device: torch.device) -> ReadRates:
        """Probe again, for as long as freed memory may still be cleared; the best so far of each rate."""
        found = read_rates(device)
        self._best_of(("read", device), lambda: found.best)
        self._best_of(("sum", device), lambda: found.sum)
        return self.best_read(device)

    def best_read(self, device: torch.device) -> ReadRates:
        """The best so far of each rate."""
        of_sum = self._best[("sum", device)]
        return ReadRates(max(of_sum, self._best[("read", device)]), of_sum)

    def sum_now(self, device: torch.device) -> float | None:
        """The rate of a sum at this moment, which counts among the best; None where there is no memory for it."""
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 2 * BYTES["cuda"]:
            return None
        found = sum_rate(_ones(device))
        self._best_of(("sum", device), lambda: found)
        return found

    def matrix_rates(self, device: torch.device, dtype: torch.dtype) -> MatrixRates:
        """Probe again; the best so far of each rate. The sustained one, a second's work, is measured once."""
        kind = (device, dtype)
        burst = self._best_of(("burst", *kind), lambda: product_rate(device, dtype))
        sustained = self._best.get(("sustained", *kind)) or self._best_of(
            ("sustained", *kind), lambda: sustained_product_rate(device, dtype)
        )
        return MatrixRates(burst, sustained)

    def _best_of(self, key: tuple[object, ...], probe: Callable[[], float]) -> float:
        self._best[key] = max(self._best.get(key, 0.0), probe())
        return self._best[key]


def read_rates(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> ReadRates:
    """Sum a large tensor in several ways; each rate is the best of medians over a time in which memory is cleared."""
    x_N = _ones(device)
    began, of_sum = clock(), sum_rate(x_N)
    while clock() - began < CLEARED_S[device.type]:
        of_sum = max(of_sum, sum_rate(x_N))
    return ReadRates(max(of_sum, *map(partial(_rate, x_N), _row_sums(x_N))), of_sum)


def sum_rate(x_N: Tensor) -> float:
    """Bytes a second of the sum of a tensor, the median of several runs."""
    return _rate(x_N, x_N.sum)


def _ones(device: torch.device) -> Tensor:
    return torch.ones(BYTES[device.type] // 4, dtype=torch.float32, device=device)


def _row_sums(x_N: Tensor) -> Iterator[Callable[[], object]]:
    for rows in ROWS:
        yield partial(torch.sum, x_N.view(rows, -1), 1)


def _rate(x_N: Tensor, read: Callable[[], object]) -> float:
    return x_N.nbytes / median_seconds(read, x_N.device)


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of one large product of random matrices, the median of several runs.

    Random, because a card that multiplies zeros takes less power and runs at a higher clock.
    """
    product, operations = _product(device, dtype)
    return operations / median_seconds(product, device)


def sustained_product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of the same product over a second of nothing else (`LASTING_S`), after a short warm-up."""
    product, operations = _product(device, dtype)
    return operations / sustained_seconds(product, device, median_seconds(product, device), LASTING_S[device.type])


def _product(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """A product of random matrices, and its operations."""
    rows, inner, columns = PRODUCT[device.type]
    x, weight = (torch.randn(shape, dtype=dtype, device=device) for shape in ((rows, inner), (columns, inner)))
    return lambda: x @ weight.T, 2 * rows * inner * columns
