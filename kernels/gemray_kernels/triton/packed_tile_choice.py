"""Tiles of products with packed weights.

A tile depends on the weight alone, so that a row's bits depend on nothing else, for up to 64 rows.
"""

from __future__ import annotations

from gemray_kernels.packed_tiles import UNITS, TiledWeight
from gemray_kernels.packed_weight import Scaling
from gemray_kernels.triton.linear_tiles import MOST_SPLITS, MULTIPROCESSORS
from gemray_kernels.triton.packed_linear import PackedTile

LEAST_INPUTS = 512
"""Fewer inputs a program are not worth their summand."""


def whole_tile(weight: TiledWeight) -> PackedTile:
    """Choose a tile for a product whose inputs are not split."""
    return PackedTile(outputs=64, num_warps=4, num_stages=5)


def tile_of_summands(weight: TiledWeight, num_out: int) -> PackedTile:
    """Choose a tile for a product of so many outputs whose reader adds up its parts."""
    tiles = -(-num_out // 64)
    inputs = weight.words_BOC.shape[0] * UNITS[weight.code].inputs
    splits = max(1, min(round(2 * MULTIPROCESSORS / tiles), inputs // LEAST_INPUTS, MOST_SPLITS))
    return PackedTile(outputs=64, num_warps=4, num_stages=5, splits=splits)


def gated_tile(weight: TiledWeight) -> PackedTile:
    """Choose a tile for a product with gate and up rows, whose result is gated."""
    outputs = 64 if weight.num_out // 2 >= 64 * MULTIPROCESSORS else 32
    return PackedTile(outputs=outputs, num_warps=4, num_stages=4)


def prompt_tile(weight: TiledWeight) -> PackedTile | None:
    """Choose a tile for many rows; None where the library's product with the numbers is faster."""
    if weight.scaling is Scaling.SUMS:
        return None
    return PackedTile(outputs=128, num_warps=8, num_stages=3, weight_first=True, rows=256)
