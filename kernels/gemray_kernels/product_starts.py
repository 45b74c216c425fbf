"""When products of plain weights start, as far as the kernels before them have to know.

Shape legend: I inputs (of a gated layer: its width H), O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ProductStarts:
    """Answers by weight and number of rows."""

    comes_ahead: Callable[[Tensor, int], bool]
    """Whether `summands` of a weight [O, I] ask for it before the rows are there."""
    at_once: Callable[[Tensor, int], bool]
    """Whether layers are faster where the kernel before `summands` lets them start at once."""
    gate_at_once: Callable[[Tensor, int], bool]
    """Likewise of `gelu_linear` and `silu_linear` of a weight [2I, H]."""


def _never(_weight: Tensor, _num_rows: int) -> bool:
    return False


NOT_AHEAD = ProductStarts(comes_ahead=_never, at_once=_never, gate_at_once=_never)
"""Products that ask for nothing before their rows are there."""
