"""Tiles of products of a single row in columns, as layers of 31B, 26B-A4B, E4B and E2B were fastest on an H200
(`benchmarks/results/2026-11-30-h200-columns`).

Inputs are cut as for other few rows. Programs are there at once where registers leave room for all: two on a
multiprocessor, three or four.
"""

from __future__ import annotations

from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.triton.ahead_tile import MOST_REGISTERS, ROOM_FOR_THREE, ROOM_FOR_TWO, AheadTile
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS
from gemray_kernels.triton.packed_columns import serves
from gemray_kernels.triton.packed_tile_choice import (
    LEAST_LONG_INPUTS,
    NARROW_OUTPUTS,
    tile_of_summands,
)


def columns_tile(weight: TiledWeight, num_out: int, num_rows: int) -> AheadTile | None:
    """Choose a tile for a single row's product, in place of `tile_of_summands` and with its parts; None where columns
    do not serve."""
    if num_rows != 1 or not serves(weight):
        return None
    splits = tile_of_summands(weight, num_out, num_rows).splits
    outputs = 64 if num_out <= NARROW_OUTPUTS else 128
    num_stages = 4 if weight.num_in >= LEAST_LONG_INPUTS * splits else 3
    return AheadTile(outputs, num_stages, splits, _registers(-(-num_out // outputs) * splits))


def gated_columns_tile(weight: TiledWeight, num_rows: int) -> AheadTile | None:
    """Likewise in place of `gated_tile`."""
    if num_rows != 1 or not serves(weight):
        return None
    programs = -(-weight.num_out // 2 // 64)
    # Larger rings of more programs take places that the next kernel's would have.
    num_stages = 4 if programs <= 2 * MULTIPROCESSORS else 3
    return AheadTile(64, num_stages, 1, _registers(programs))


def _registers(programs: int) -> int:
    if programs <= 2 * MULTIPROCESSORS:
        return ROOM_FOR_TWO
    return ROOM_FOR_THREE if programs <= 3 * MULTIPROCESSORS else MOST_REGISTERS
