"""What a device can do at best: how fast it reads its memory, how fast its matrix units multiply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gemray_cluster.bench.timing import median_seconds, sustained_seconds

BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
PRODUCT = {"cuda": (4096, 8192, 8192), "cpu": (256, 512, 512)}
"""Rows, inner width and columns: on a card, of the size of a chunk of prompt through a large layer."""


LASTING_S = {"cuda": 1.0, "cpu": 0.02}


@dataclass(frozen=True)
class MatrixRates:
    """Operations a second of large products, a multiplication and an addition counted as two."""

    burst: float
    """What a few products reach."""
    sustained: float
    """What a second of nothing else reaches, for which a card at its limit of power lowers its clock."""


class Probes:
    """The best rates that this process has measured on each of its devices.

    In one process the same sum has measured 3.11 and 2.61 TB/s on one H100, in different setups; the reason was not
    found. Floors use the best.
    """

    def __init__(self) -> None:
        self._best: dict[tuple[object, ...], float] = {}

    def bandwidth(self, device: torch.device) -> float:
        """Probe again; the best so far, in bytes a second."""
        return self._best_of(("bandwidth", device), lambda: read_bandwidth(device))

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


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of summing a large tensor, the median of several runs."""
    x = torch.ones(BYTES[device.type] // 4, dtype=torch.float32, device=device)
    return x.nbytes / median_seconds(x.sum, device)


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
