"""Tiles of products with packed weights.

What decides the bits of a row, the splits and the order within them, depends on the weight alone, up to 64 rows; how
many outputs a program has, and which operand the weight is, follows the rows: eight rows are enough for a right one.
The rules are those of sweeps over 31B's weights on an H200 (`benchmarks/packed_kernels`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gemray_kernels.packed_tiles import UNITS, TiledWeight
from gemray_kernels.packed_weight import CodeName, Scaling
from gemray_kernels.triton.linear_tiles import MOST_SPLITS, MULTIPROCESSORS
from gemray_kernels.triton.packed_linear import PackedTile
from gemray_kernels.triton.packed_prompts import PromptTile

LEAST_INPUTS = 512
"""Fewer inputs a program are not worth their summand."""
FEW_ROWS = 16
"""More rows are read too often by programs of few outputs."""
PROMPT_SPLITS = 3
"""Most parts of a prompt's product that a reader adds up."""


@dataclass(frozen=True)
class _Tiles:
    few: PackedTile
    """Tile of a product of at most `FEW_ROWS` rows whose outputs are not gated."""
    programs: int
    """About how many of them there should be, by splits."""
    more: PackedTile
    """Tile of up to 64 rows."""
    few_gated: PackedTile
    more_gated: PackedTile
    most_prompt_rows: int
    """More rows pay for a pass that writes the numbers down."""
    few_gated_rows: int = FEW_ROWS
    """Most rows that take `few_gated`."""


_EIGHT_BITS = _Tiles(
    few=PackedTile(64, 4, 4, prefetched=4),
    programs=2 * MULTIPROCESSORS,
    more=PackedTile(128, 4, 4, weight_first=True, prefetched=4),
    few_gated=PackedTile(64, 4, 4, prefetched=4),
    more_gated=PackedTile(64, 4, 4, prefetched=4),
    most_prompt_rows=768,
)
_TILES: Mapping[CodeName, _Tiles] = {
    "int4": _Tiles(
        few=PackedTile(64, 2, 4, weight_first=True),
        programs=4 * MULTIPROCESSORS,
        more=PackedTile(128, 4, 4),
        few_gated=PackedTile(32, 2, 3, units=2, weight_first=True),
        more_gated=PackedTile(64, 4, 4),
        most_prompt_rows=512,
    ),
    "nvfp4": _Tiles(
        few=PackedTile(64, 2, 4, units=2, weight_first=True),
        programs=4 * MULTIPROCESSORS,
        more=PackedTile(128, 4, 4),
        few_gated=PackedTile(32, 2, 3, units=2, weight_first=True),
        few_gated_rows=8,
        more_gated=PackedTile(64, 4, 3, units=2),
        most_prompt_rows=512,
    ),
    "int8": _EIGHT_BITS,
    "fp8": _EIGHT_BITS,
}


def whole_tile(weight: TiledWeight) -> PackedTile:
    """Choose a tile for a product whose inputs are not split."""
    return PackedTile(outputs=64, num_warps=4, num_stages=5)


def tile_of_summands(weight: TiledWeight, num_out: int, num_rows: int) -> PackedTile:
    """Choose a tile for a product of so many outputs, of at most 64 rows, whose reader adds up its parts."""
    tiles = _TILES[weight.code]
    programs = -(-num_out // tiles.few.outputs)
    inputs = weight.words_BOC.shape[0] * UNITS[weight.code].inputs
    splits = max(1, min(round(tiles.programs / programs), inputs // LEAST_INPUTS, MOST_SPLITS))
    # Splits end where steps do: those of all rows are the same.
    tile = tiles.few if num_rows <= FEW_ROWS else replace(tiles.more, units=tiles.few.units)
    return replace(tile, splits=splits)


def gated_tile(weight: TiledWeight, num_rows: int) -> PackedTile:
    """Choose a tile for a product of at most 64 rows with gate and up rows, whose result is gated."""
    tiles = _TILES[weight.code]
    tile = tiles.few_gated if num_rows <= tiles.few_gated_rows else tiles.more_gated
    is_small = weight.num_out // 2 < 64 * MULTIPROCESSORS
    return PackedTile(outputs=32, num_warps=4, num_stages=4) if is_small and tile.outputs > 32 else tile


def prompt_tile(weight: TiledWeight, num_rows: int, *, most_splits: int = 1) -> PromptTile | None:
    """Choose a tile for more than 64 rows; None where the library's product with the numbers is faster.

    A tile dequantizes for each 128 rows; numbers that are written down are read and written once more, whatever the
    rows. Tiles have more outputs than rows, as numbers of rows have two to four times the bytes of a weight's.
    """
    if weight.scaling is Scaling.SUMS or num_rows > _TILES[weight.code].most_prompt_rows:
        return None
    tile = PromptTile(outputs=256, rows=128, num_warps=8, num_stages=3)
    programs = -(-weight.num_out // tile.outputs) * -(-num_rows // tile.rows)
    splits = min(range(1, most_splits + 1), key=lambda count: -(-programs * count // MULTIPROCESSORS) / count)
    return replace(tile, splits=splits)
