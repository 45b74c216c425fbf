"""Tiles of exact products of few rows with packed weights. They follow speed alone: a row's bits are the same in all.

They follow sweeps over weights of 31B on an H200 (`benchmarks/results/2026-11-29-exact-packed` for int4,
`2026-11-30-h200-exact-packed` for the others).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.packed_weight import CodeName, Scaling
from gemray_kernels.triton.exact_packed_linear import ExactPackedTile
from gemray_kernels.triton.exact_tiles import streaming_leaves
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS

FEW_ROWS = 16
"""More rows take wgmma, whose left operand has 64 outputs."""
MANY_ROWS = 32
"""Summands of more rows take longer to be written and read than programs of two leaves cost."""

_MORE = ExactPackedTile(64, 4, 4, weight_first=True)
_MANY_GATED = ExactPackedTile(64, 4, 3, weight_first=True)


@dataclass(frozen=True)
class _Tiles:
    whole: ExactPackedTile
    """Tile of weights of one leaf."""
    leaf: ExactPackedTile
    """Tile of one leaf of several."""
    gated: ExactPackedTile
    small: ExactPackedTile
    """Tile of one leaf and few outputs."""
    gated_rows: int = FEW_ROWS
    """Most rows that take `gated`."""
    more_gated: ExactPackedTile = _MORE
    """Tile of up to 32 rows."""


_EIGHT_BITS = _Tiles(
    whole=ExactPackedTile(64, 4, 5, weight_first=True),
    leaf=ExactPackedTile(64, 2, 4, weight_first=True),
    gated=ExactPackedTile(64, 4, 3, weight_first=True),
    small=ExactPackedTile(32, 4, 4),
    more_gated=ExactPackedTile(64, 4, 3),
)
_FEW: Mapping[CodeName, _Tiles] = {
    "int4": _Tiles(
        whole=ExactPackedTile(64, 2, 4, weight_first=True, units=2),
        leaf=ExactPackedTile(64, 2, 4, weight_first=True),
        gated=ExactPackedTile(32, 2, 3, weight_first=True, units=2),
        small=ExactPackedTile(32, 2, 4, weight_first=True, units=2),
    ),
    "nvfp4": _Tiles(
        whole=ExactPackedTile(64, 2, 4, weight_first=True, units=2),
        leaf=ExactPackedTile(64, 2, 4, weight_first=True, units=2),
        gated=ExactPackedTile(32, 2, 4, weight_first=True),
        small=ExactPackedTile(32, 2, 4, weight_first=True, units=2),
        gated_rows=8,
    ),
    "int8": _EIGHT_BITS,
    "fp8": _EIGHT_BITS,
}
_MORE_LEAF = ExactPackedTile(128, 8, 3, weight_first=True)


def few_rows_tile(weight: TiledWeight, num_rows: int, num_out: int) -> ExactPackedTile:
    """Choose a tile for so many outputs of at most 64 rows."""
    if weight.scaling is Scaling.EACH:  # whose scales take registers and shared memory
        return ExactPackedTile(32, 4, 2, leaves=min(2, streaming_leaves(num_rows, num_out, weight.leaves)))
    tiles = _FEW[weight.code]
    if weight.leaves > 1:
        tile = tiles.leaf if num_rows <= FEW_ROWS else _MORE_LEAF
        return replace(tile, leaves=2 if num_rows > MANY_ROWS else 1)
    if num_rows > FEW_ROWS:
        return _MORE
    return tiles.small if num_out < 64 * MULTIPROCESSORS else tiles.whole


def gated_tile(weight: TiledWeight, num_rows: int) -> ExactPackedTile:
    """Choose a tile for at most 64 rows of a weight of one leaf, half of whose outputs gate the others."""
    if weight.scaling is Scaling.EACH:
        return ExactPackedTile(32, 4, 2)
    tiles = _FEW[weight.code]
    if num_rows > tiles.gated_rows:
        return tiles.more_gated if num_rows <= MANY_ROWS else _MANY_GATED
    return tiles.small if weight.num_out // 2 < 64 * MULTIPROCESSORS and tiles.gated.outputs > 32 else tiles.gated
