"""Tiles of exact products of few rows with packed weights. They follow speed alone: a row's bits are the same in all.

They follow sweeps over weights of 31B on an H200 (`benchmarks/results/2026-11-29-exact-packed` for int4,
`2026-11-30-h200-exact-packed` for the others).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.packed_weight import CodeName, Scaling
from gemray_kernels.triton import packed_tile_choice
from gemray_kernels.triton.ahead_tile import AheadTile
from gemray_kernels.triton.exact_packed_ahead import makes_numbers, serves
from gemray_kernels.triton.exact_packed_linear import ExactPackedTile
from gemray_kernels.triton.exact_tiles import streaming_leaves
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS, PROMPT_TILE_ROWS
from gemray_kernels.triton.packed_ahead import ROWS
from gemray_kernels.triton.packed_prompts import PromptTile
from gemray_kernels.triton.packed_ring import UNIT_INPUTS

MOST_WITHOUT_WGMMA = 16
"""Rows; more take wgmma, whose left operand has 64 outputs."""
MOST_LEAF_ROWS = 32
"""Rows; summands of more take longer to be written and read than programs of two leaves cost."""

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
    gated_rows: int = MOST_WITHOUT_WGMMA
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
LEAST_AHEAD = 1.6
"""Programs a multiprocessor, at least, of products whose weights come ahead."""
SHORT_LEAF = 2048
"""Inputs of a leaf of the o projection behind attention, at most."""


@dataclass(frozen=True)
class _Ahead:
    """Products whose weights come ahead: those of 31B that are faster so
    (`benchmarks/results/2026-11-30-h200-exact-ahead`). Those of one leaf that are not gated are not."""

    short: AheadTile
    """Tile of leaves of at most `SHORT_LEAF`."""
    gated: AheadTile
    long: AheadTile | None = None
    """Tile of longer leaves."""


_EIGHT_BITS_AHEAD = _Ahead(
    short=AheadTile(128, 4, most_registers=80),
    gated=AheadTile(64, 2),
)
_AHEAD: Mapping[CodeName, _Ahead] = {
    "int4": _Ahead(
        short=AheadTile(128, 4, most_registers=80),
        gated=AheadTile(64, 3, most_registers=80),
    ),
    "nvfp4": _Ahead(
        short=AheadTile(128, 4, most_registers=80),
        gated=AheadTile(64, 3, most_registers=80),
        long=AheadTile(64, 3),
    ),
    "int8": _EIGHT_BITS_AHEAD,
    "fp8": _EIGHT_BITS_AHEAD,
}
"""Those of int8, which was not timed, are fp8's."""
_MORE_LEAF = ExactPackedTile(128, 8, 3, weight_first=True)


def few_rows_tile(weight: TiledWeight, num_rows: int, num_out: int) -> ExactPackedTile:
    """Choose a tile for so many outputs of at most 64 rows."""
    if weight.scaling is Scaling.EACH:  # whose scales take registers and shared memory
        return ExactPackedTile(32, 4, 2, leaves=min(2, streaming_leaves(num_rows, num_out, weight.leaves)))
    tiles = _FEW[weight.code]
    if weight.leaves > 1:
        tile = tiles.leaf if num_rows <= MOST_WITHOUT_WGMMA else _MORE_LEAF
        return replace(tile, leaves=2 if num_rows > MOST_LEAF_ROWS else 1)
    if num_rows > MOST_WITHOUT_WGMMA:
        return _MORE
    return tiles.small if num_out < 64 * MULTIPROCESSORS else tiles.whole


def gated_tile(weight: TiledWeight, num_rows: int) -> ExactPackedTile:
    """Choose a tile for at most 64 rows of a weight of one leaf, half of whose outputs gate the others."""
    if weight.scaling is Scaling.EACH:
        return ExactPackedTile(32, 4, 2)
    tiles = _FEW[weight.code]
    if num_rows > tiles.gated_rows:
        return tiles.more_gated if num_rows <= MOST_LEAF_ROWS else _MANY_GATED
    return tiles.small if weight.num_out // 2 < 64 * MULTIPROCESSORS and tiles.gated.outputs > 32 else tiles.gated


def ahead_tile(weight: TiledWeight, num_rows: int, num_out: int) -> AheadTile | None:
    """Choose a tile for the kernel that asks for weights ahead, in place of `few_rows_tile`; None where that one's is
    faster."""
    if weight.leaves == 1:
        return None
    tiles = _AHEAD[weight.code]
    tile = tiles.short if weight.leaf <= SHORT_LEAF else tiles.long
    return _if_faster(tile, weight, num_rows, num_out)


def gated_ahead_tile(weight: TiledWeight, num_rows: int) -> AheadTile | None:
    """Likewise in place of `gated_tile`."""
    return _if_faster(_AHEAD[weight.code].gated, weight, num_rows, weight.num_out // 2)


def _if_faster(tile: AheadTile | None, weight: TiledWeight, num_rows: int, num_out: int) -> AheadTile | None:
    if tile is None or num_rows > ROWS.value or not serves(weight):
        return None
    programs = -(-num_out // tile.outputs) * weight.leaves
    return tile if programs >= LEAST_AHEAD * MULTIPROCESSORS else None


def takes_prompts(weight: TiledWeight, num_rows: int) -> bool:
    """Whether numbers are made as they are multiplied with more than 64 rows, and not written down first.

    Parts of a leaf each, which the reader adds up, take less time than numbers do up to a row for four of its inputs.
    """
    has_units = weight.unit.inputs == UNIT_INPUTS or weight.code == "nvfp4"
    if weight.leaves == 1:
        return has_units and makes_numbers(weight)
    return serves(weight) and num_rows <= weight.leaf // 4 // PROMPT_TILE_ROWS * PROMPT_TILE_ROWS


def prompt_tile(weight: TiledWeight, num_rows: int, num_out: int) -> PromptTile:
    """Choose a tile for such a product, whose programs have a leaf each."""
    tile = packed_tile_choice.prompt_tile(weight.code, num_out * weight.leaves, weight.leaf, num_rows)
    return replace(tile, splits=weight.leaves)
