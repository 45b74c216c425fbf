"""Tiles of the published models' linear layers.

Into how many parts inputs are cut depends on the weight's shape alone, so that a row's bits depend on nothing else.
What else a tile holds changes no sum (`triton.exact_linear` says why) and may follow the rows. The rules follow a sweep
over every weight of the published models on an H100 (`benchmarks/results/2026-11-28-h100-products`), and one over their
layers, in the order of a step, on an H200 (`benchmarks/results/2026-11-30-h200-tiles`). Programs of all of them start
early, and ask for no weight before they wait: layers are 3 to 9% faster than with 1,024 bytes of each row
(`benchmarks/results/2026-11-29-h200-late-products`).
"""

from __future__ import annotations

from dataclasses import replace

from gemray_kernels.triton.linear import LinearTile

MULTIPROCESSORS = 132
"""An H100's."""
PROMPT_TILE_ROWS = 128
"""Rows of a tile of a prompt's products, or a half of them. Which kernel multiplies more rows than a start rehearses by
themselves may change at multiples of it alone: so a rehearsal of these has all programs."""
MOST_SPLITS = 16
LEAST_INPUTS = 256
"""Fewer inputs a program are not worth their summand."""
MOST_INPUTS = 3500
"""More inputs a program are read sooner by two at once."""
MOST_WHOLE = 100
"""Programs of whole inputs, of which more are read sooner by twice as many."""
SPLITS = (8, 4, 3, 2, 1)
"""Parts for one program a multiprocessor."""
GATE_TILES = 4
"""A layer gate's, of 256 outputs."""
GATE_SPLITS = 4
"""Parts of a layer gate: every program of its reader adds them all up."""
_RIGHT_16 = LinearTile(outputs=16, inputs=256, num_warps=4, num_stages=4, weight_first=False)
_RIGHT_32 = LinearTile(outputs=32, inputs=128, num_warps=4, num_stages=4, weight_first=False)
_RIGHT_LONG = LinearTile(outputs=32, inputs=256, num_warps=4, num_stages=3, weight_first=False)
_DEEP = LinearTile(outputs=64, inputs=128, num_warps=4, num_stages=5)


def whole_tile(num_out: int) -> LinearTile | None:
    """Choose a tile for a product whose inputs are not split; None where the library's is faster."""
    if num_out < 16 * MULTIPROCESSORS:
        return None
    return LinearTile(outputs=64, inputs=128, num_warps=4, num_stages=3 if num_out > 64 * MULTIPROCESSORS else 5)


def tile_of_summands(num_rows: int, num_out: int, num_in: int) -> LinearTile:
    """Choose a tile for a product whose reader adds up its parts.

    One program a multiprocessor with a long pipeline, where it has not too many inputs to read; else two at work at
    once.
    """
    tiles = -(-num_out // 64)
    if tiles == GATE_TILES:
        return replace(_DEEP, splits=min(GATE_SPLITS, max(1, num_in // LEAST_INPUTS)))
    splits = next(n for n in SPLITS if n == 1 or (n * tiles <= MULTIPROCESSORS and n * LEAST_INPUTS <= num_in))
    most = MULTIPROCESSORS if splits > 1 else MOST_WHOLE
    if MULTIPROCESSORS // 2 <= splits * tiles <= most and num_in // splits <= MOST_INPUTS:
        return replace(_DEEP, splits=splits)
    splits = _splits(2 * MULTIPROCESSORS, tiles, num_in)
    if splits == 1 and num_rows > 32 and 2 * MULTIPROCESSORS < tiles <= 4 * MULTIPROCESSORS:
        # Two of these lie side by side, and so do two of the others: here all are at work at once.
        return LinearTile(outputs=128, inputs=64, num_warps=4, num_stages=4)
    return LinearTile(outputs=64, inputs=128, num_warps=4, num_stages=3, splits=splits)


def gated_tile(num_rows: int, num_out: int) -> LinearTile:
    """Choose a tile for a product with gate and up rows, whose result is gated."""
    width = num_out // 2
    if width < 32 * MULTIPROCESSORS:  # a smaller tile keeps more multiprocessors at work
        return _RIGHT_32 if num_rows <= 16 else _RIGHT_16
    if width > 128 * MULTIPROCESSORS and num_rows <= 16:
        return _RIGHT_LONG
    if width >= 64 * MULTIPROCESSORS and num_rows <= 16:
        return LinearTile(outputs=64, inputs=128, num_warps=4, num_stages=3)
    stages = 5 if width < 64 * MULTIPROCESSORS else 4
    if width > 128 * MULTIPROCESSORS:
        stages = 6 if num_rows <= 32 else 3
    return LinearTile(outputs=64, inputs=64, num_warps=4, num_stages=stages)


def _splits(programs: int, tiles: int, num_in: int) -> int:
    return max(1, min(round(programs / tiles), num_in // LEAST_INPUTS, MOST_SPLITS))
