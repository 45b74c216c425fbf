"""Tiles of products with packed weights.

What decides the bits of a row, the splits and the order within them, depends on the weight alone, up to 64 rows; how
many outputs a program has may follow the rows. The rules follow a sweep over the weights of 31B (`benchmarks/results`):
with 4 bits a number, programs of 128 outputs hide their steps' latency best.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemray_kernels.packed_tiles import UNITS, TiledWeight
from gemray_kernels.packed_weight import CodeName, Scaling
from gemray_kernels.triton.linear_tiles import MOST_SPLITS, MULTIPROCESSORS
from gemray_kernels.triton.packed_linear import PackedTile

LEAST_INPUTS = 512
"""Fewer inputs a program are not worth their summand."""
MOST_PROMPT_ROWS = 768
"""More rows pay for a pass that writes the numbers down."""


@dataclass(frozen=True)
class _Tiles:
    plain: PackedTile
    """Tile of a product whose outputs are not gated."""
    programs: int
    """About how many of them there should be, by splits."""
    gated: PackedTile


_TILES: dict[CodeName, _Tiles] = {
    "int4": _Tiles(PackedTile(128, 4, 4), 2 * MULTIPROCESSORS, PackedTile(64, 4, 4)),
    "nvfp4": _Tiles(PackedTile(128, 4, 4), 3 * MULTIPROCESSORS, PackedTile(64, 4, 4)),
    "int8": _Tiles(PackedTile(64, 4, 4), 2 * MULTIPROCESSORS, PackedTile(64, 4, 4)),
    "fp8": _Tiles(PackedTile(64, 4, 4), 2 * MULTIPROCESSORS, PackedTile(64, 4, 4)),
}


def whole_tile(weight: TiledWeight) -> PackedTile:
    """Choose a tile for a product whose inputs are not split."""
    return PackedTile(outputs=64, num_warps=4, num_stages=5)


def tile_of_summands(weight: TiledWeight, num_out: int) -> PackedTile:
    """Choose a tile for a product of so many outputs whose reader adds up its parts."""
    tiles = _TILES[weight.code]
    programs = -(-num_out // tiles.plain.outputs)
    inputs = weight.words_BOC.shape[0] * UNITS[weight.code].inputs
    splits = max(1, min(round(tiles.programs / programs), inputs // LEAST_INPUTS, MOST_SPLITS))
    return replace(tiles.plain, splits=splits)


def gated_tile(weight: TiledWeight) -> PackedTile:
    """Choose a tile for a product with gate and up rows, whose result is gated."""
    tile = _TILES[weight.code].gated
    is_small = weight.num_out // 2 < tile.outputs * MULTIPROCESSORS
    return PackedTile(outputs=32, num_warps=4, num_stages=4) if is_small else tile


def prompt_tile(weight: TiledWeight, num_rows: int, *, most_splits: int = 1) -> PackedTile | None:
    """Choose a tile for many rows; None where the library's product with the numbers is faster.

    A tile that dequantizes does so for each 256 rows, and keeps tensor cores a third less busy than the library does;
    numbers that are written down are read and written once more, whatever the rows.
    """
    if weight.scaling is Scaling.SUMS or num_rows > MOST_PROMPT_ROWS:
        return None
    tile = PackedTile(outputs=128, num_warps=8, num_stages=3, weight_first=True, rows=256)
    if weight.code == "nvfp4":
        tile = replace(tile, num_stages=4, rows=128)
    programs = -(-weight.num_out // tile.outputs) * -(-num_rows // tile.rows)
    splits = min(range(1, most_splits + 1), key=lambda count: -(-programs * count // MULTIPROCESSORS) / count)
    if num_rows > 256 and programs * splits < MULTIPROCESSORS:
        return None
    return replace(tile, splits=splits)


PROMPT_SPLITS = 3
"""Most parts of a prompt's product that a reader adds up."""
