"""Tiles of the published models' linear layers.

A tile depends on the weight's shape alone, so that a row's bits depend on nothing else.
"""

from __future__ import annotations

from gemray_kernels.triton.linear import LinearTile

MEASURED_WIDTHS = (5376,)
"""Hidden sizes whose layers were faster streamed and agreed with the library on a card (31B). The others, of which some
did not agree, have the library's products until they are looked into."""
PROGRAMS = 264
"""Two for each of an H100's multiprocessors, all at work at the same time."""


def whole_tile(num_out: int, num_in: int) -> LinearTile | None:
    """Of a product whose inputs are not split; None where the library's is faster."""
    if not _is_measured(num_out, num_in) or num_out < 64 * PROGRAMS // 4:
        return None
    return LinearTile(outputs=64, inputs=128, num_warps=4, num_stages=5)


def tile_of_summands(num_out: int, num_in: int) -> LinearTile | None:
    """Of a product whose reader adds up its parts; None where the library's is faster."""
    if not _is_measured(num_out, num_in):
        return None
    tiles = -(-num_out // 64)
    splits = max(1, min(PROGRAMS // tiles, num_in // 512, 8))
    return LinearTile(outputs=64, inputs=128, num_warps=4, num_stages=5, splits=splits)


def gated_tile(num_out: int, num_in: int) -> LinearTile | None:
    """Of a product with gate and up rows, whose result is gated; None where the library's is faster."""
    return LinearTile(outputs=64, inputs=128, num_warps=4, num_stages=3) if _is_measured(num_out, num_in) else None


def _is_measured(num_out: int, num_in: int) -> bool:
    return num_out in MEASURED_WIDTHS or num_in in MEASURED_WIDTHS
