"""Tiles of 65 to 256 rows, by an estimate of what each would cost.

All programs compute a tile at a time. So a product takes the rounds of its tiles, each as long as the matrix units or
the cache need for a program's inputs, or as long as the memory needs for the weight, and a little of the shorter of
both; summands that a reader adds up are written and read again. The numbers are fitted to a sweep over the weights of
31B, 26B-A4B and E4B on an H200 (`benchmarks/results/2026-11-30-h200-exact-rows`).
"""

from __future__ import annotations

from functools import lru_cache

from gemray_kernels.triton.exact_rows import RowsTile
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS

MOST_ROWS = 256
"""More rows are the business of tiles of 128 rows."""
WIDTHS = (48, 64, 80, 96, 128, 144, 160, 192, 256)
"""Widths of tiles: 16 or more in each of two powers of two."""
ROWS = (80, 96, 128, 160, 192, MOST_ROWS)
"""Numbers of rows for which tiles are chosen, the next one for those between: a weight has six programs at most."""
SHARED_BYTES = 225 * 1024
"""Shared memory for tiles that wait to be multiplied."""
GATE_BYTES = 4096
"""Shared memory for what a group of warps gates at a time."""
MOST_STAGES = 8
SUMS = {1: 196, 2: 196, 3: 128}
"""Registers of a thread for sums, by groups of warps."""
WIDEST = {1: 256, 2: 256, 3: 192}
"""Widest tile by groups of warps: what one product may write."""
CYCLES = 1.7e9
"""Cycles a second of a multiprocessor at work."""
CACHE_BYTES = 52
"""Bytes that a multiprocessor gets in a cycle."""
MEMORY_BYTES = 3.6e12 / CYCLES
"""Bytes that the card reads in a cycle."""
UNHIDDEN = 0.1
"""Part of the shorter of both, computing and reading the weight, that the longer one does not hide."""
SUMMAND_BYTES = 2.5e12 / CYCLES
"""Bytes of summands that are written and read again in a cycle."""
TILE_CYCLES = 300
"""Cycles for a tile's first products and its sums' way to memory."""


@lru_cache(1024)
def rows_tile(num_rows: int, num_out: int, leaf: int, leaves: int) -> RowsTile:
    """Choose a tile, and how many leaves a program adds up, where the reader adds up the rest.

    Args:
        num_rows: 1 to 256.
        num_out: outputs.
        leaf: inputs of a leaf.
        leaves: of the product.
    """
    num_rows = _rounded(num_rows)
    return _cheapest(
        [
            _tile(groups, width, together, 0)
            for together in (1, 2, 4, 8)
            if together <= leaves
            for groups in (1, 2, 3)
            for width in _widths(num_rows)
        ],
        num_rows,
        num_out,
        leaf,
        leaves,
    )


@lru_cache(1024)
def gated_rows_tile(num_rows: int, num_out: int, leaf: int) -> RowsTile:
    """Choose a tile of one leaf for a weight with gate and up rows, `num_out` together, whose result is gated."""
    num_rows = _rounded(num_rows)
    tiles = [_tile(groups, width, 1, groups * GATE_BYTES) for groups in (1, 2, 3) for width in _widths(num_rows)]
    return _cheapest(tiles, num_rows, num_out, leaf, 1)


def _rounded(num_rows: int) -> int:
    return next(rows for rows in ROWS if rows >= num_rows)


def _tile(groups: int, width: int, leaves: int, reserved_bytes: int) -> RowsTile:
    stages = min(MOST_STAGES, (SHARED_BYTES - reserved_bytes) // _stage_bytes(groups, width))
    return RowsTile(groups, width, stages, leaves)


def _widths(num_rows: int) -> list[int]:
    """The least width that holds all rows, and those that hold them in two, three and four tiles."""
    parts = (-(-num_rows // n) for n in (1, 2, 3, 4))
    return list(dict.fromkeys(next(width for width in WIDTHS if width >= part) for part in parts))


def _stage_bytes(groups: int, width: int) -> int:
    return (64 * groups + width) * 128


def _cheapest(tiles: list[RowsTile], num_rows: int, num_out: int, leaf: int, leaves: int) -> RowsTile:
    fitting = filter(_fits_registers, tiles)
    return min(fitting, key=lambda tile: _cycles(tile, num_rows, num_out, leaf, leaves))


def _fits_registers(tile: RowsTile) -> bool:
    """Whether a group's sums and those that wait for their neighbours of the tree stay in registers."""
    return tile.width <= WIDEST[tile.groups] and tile.leaves.bit_length() * tile.width // 2 <= SUMS[tile.groups]


def _cycles(tile: RowsTile, num_rows: int, num_out: int, leaf: int, leaves: int) -> float:
    """How long the product takes with a tile."""
    splits = leaves // tile.leaves
    tiles = -(-num_out // (64 * tile.groups)) * -(-num_rows // tile.width) * splits
    steps = -(-leaf // 64) * tile.leaves
    # A group's product of 64 by `width` with 16 inputs takes half as many cycles.
    step = max(2 * tile.groups * tile.width, _stage_bytes(tile.groups, tile.width) / CACHE_BYTES)
    at_work = -(-tiles // MULTIPROCESSORS) * (steps * step + TILE_CYCLES)
    summands = splits * num_rows * num_out * 4 if splits > 1 else 0
    reading = num_out * leaf * leaves * 2 / MEMORY_BYTES
    return max(at_work, reading) + UNHIDDEN * min(at_work, reading) + summands / SUMMAND_BYTES
