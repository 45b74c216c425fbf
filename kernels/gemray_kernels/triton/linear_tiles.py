"""Tiles of the published models' linear layers.

A tile depends on the weight's shape alone, so that a row's bits depend on nothing else. The rules follow a sweep over
every weight of the published models on an H100 (`benchmarks/results/2026-11-28-h100-products`). Programs of all of them
start early, and ask for no weight before they wait: layers are 3 to 9% faster than with 1,024 bytes of each row
(`benchmarks/results/2026-11-29-h200-late-products`).
"""

from __future__ import annotations

from gemray_kernels.triton.linear import LinearTile

MULTIPROCESSORS = 132
"""An H100's."""
MOST_SPLITS = 16
LEAST_INPUTS = 256
"""Fewer inputs a program are not worth their summand."""
ENOUGH_INPUTS = 340
"""Inputs a program from which more programs beat longer pipelines."""


def whole_tile(num_out: int, num_in: int) -> LinearTile | None:
    """Choose a tile for a product whose inputs are not split; None where the library's is faster."""
    if num_out < 16 * MULTIPROCESSORS:
        return None
    return LinearTile(outputs=64, inputs=128, num_warps=4, num_stages=3 if num_out > 64 * MULTIPROCESSORS else 5)


def tile_of_summands(num_out: int, num_in: int) -> LinearTile:
    """Choose a tile for a product whose reader adds up its parts.

    Two programs a multiprocessor at work at once read fastest; where that would leave each with few inputs, one with a
    longer pipeline does.
    """
    tiles = -(-num_out // 64)
    splits = _splits(2 * MULTIPROCESSORS, tiles, num_in)
    if splits == 1 or num_in // splits >= ENOUGH_INPUTS or tiles * splits < MULTIPROCESSORS // 2:
        return LinearTile(outputs=64, inputs=128, num_warps=4, num_stages=3, splits=splits)
    splits = _splits(MULTIPROCESSORS, tiles, num_in)
    return LinearTile(outputs=64, inputs=128, num_warps=4, num_stages=5, splits=splits)


def gated_tile(num_out: int, num_in: int) -> LinearTile:
    """Choose a tile for a product with gate and up rows, whose result is gated."""
    if num_out // 2 < 32 * MULTIPROCESSORS:  # a smaller tile keeps more multiprocessors at work
        return LinearTile(outputs=16, inputs=256, num_warps=4, num_stages=4, weight_first=False)
    return LinearTile(outputs=64, inputs=128, num_warps=4, num_stages=3)


def _splits(programs: int, tiles: int, num_in: int) -> int:
    return max(1, min(round(programs / tiles), num_in // LEAST_INPUTS, MOST_SPLITS))
