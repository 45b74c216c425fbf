"""Products of a verify step's rows that tiles of their own serve in fast numerics: those that whole layers gained by.

31B with 16 sequences of five rows, and of 32 sequences of five the second product and a rank of two: elsewhere the
library's products are as fast, or faster (`benchmarks/results/2026-11-30-h200-bf16-rows`).
"""

from __future__ import annotations

from gemray_kernels.triton.rows_pieces import rounded
from gemray_kernels.triton.verify_rows import VerifyRowsTile

ROWS = (80, 160)
"""Numbers of rows that have tiles, with those from the next lower one of `rows_pieces.ROWS` on."""
_SHAPES_OF_O = ((5376, 8192), (5376, 16384))
"""Outputs and inputs, in sliding and in full layers of 31B."""
_GATED = {(80, 43008, 5376): VerifyRowsTile(2, 80), (160, 21504, 5376): VerifyRowsTile(3, 160)}
"""By rows, outputs and inputs, as the others. The second is a rank's of two."""
_WHOLE = {(160, 5376, 4096): VerifyRowsTile(1, 160)}
"""A rank's of two, whose sum is sent."""
_PARTS = {(rows, *shape): VerifyRowsTile(2, rows, splits=3) for rows in ROWS for shape in _SHAPES_OF_O} | {
    (80, 5376, 21504): VerifyRowsTile(2, 80, splits=3)
}
"""Three parts of 42 tiles keep 126 of 132 multiprocessors at work."""


def gated_verify_tile(num_rows: int, num_out: int, num_in: int) -> VerifyRowsTile | None:
    """Choose a tile for a product with gate and up rows, whose result is gated; None where the library's serves.

    Args:
        num_rows: 1 to 256.
        num_out: outputs.
        num_in: inputs.
    """
    return _GATED.get((rounded(num_rows), num_out, num_in))


def whole_verify_tile(num_rows: int, num_out: int, num_in: int) -> VerifyRowsTile | None:
    """Choose a tile for a product whose inputs are not split; arguments as for `gated_verify_tile`."""
    return _WHOLE.get((rounded(num_rows), num_out, num_in))


def verify_tile_of_summands(num_rows: int, num_out: int, num_in: int) -> VerifyRowsTile | None:
    """Choose a tile for a product whose reader adds up its parts; arguments as for `gated_verify_tile`."""
    return _PARTS.get((rounded(num_rows), num_out, num_in))
