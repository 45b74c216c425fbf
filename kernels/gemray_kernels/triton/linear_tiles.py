"""Tiles of the published models' linear layers.

Into how many parts inputs are cut depends on the weight's shape alone, so that a row's bits depend on nothing else.
What else a tile holds changes no sum (`triton.exact_linear` says why) and may follow the rows. The rules follow a sweep
over every weight of the published models on an H100 (`benchmarks/results/2026-11-28-h100-products`), and one over their
layers, in the order of a step, on an H200 (`benchmarks/results/2026-11-30-h200-tiles`). Programs of all of them start
early. On Hopper cards most ask for their weight before they wait, into rings (`linear_ahead`), whose tiles are those
that layers were fastest with (`benchmarks/results/2026-11-30-h200-plain-ahead`, `2026-12-01-h200-verify-ahead`); others
ask for nothing before.
"""

from __future__ import annotations

from dataclasses import replace

from gemray_kernels.triton.ahead_tile import ROOM_FOR_THREE, ROOM_FOR_TWO, AheadTile
from gemray_kernels.triton.linear import MOST_ROWS, Gate, LinearTile
from gemray_kernels.triton.linear_ahead import MOST_AHEAD_ROWS, STEP_INPUTS, step_bytes

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
RING_BYTES = 223 * 1024
"""Shared memory of a multiprocessor that rings may take, beside what programs have else."""
MOST_STAGES = 8
MOST_BESIDE = 3
"""Most programs beside each other on a multiprocessor, so that all of a product are there at once."""
LEAST_NUMBERS = 1 << 25
"""Numbers of a weight that comes ahead of more than 64 rows: layers with smaller ones are faster with the library's."""
LEAST_GATED_NUMBERS = 1 << 27
"""Likewise of a gated product."""
MOST_AT_ONCE = 16
"""With more rows layers are no faster where norms let products start at once, nor ranks where whole ones come ahead."""
REGISTERS = {1: ROOM_FOR_TWO, 2: ROOM_FOR_TWO, 3: ROOM_FOR_THREE}
"""Registers of a thread, by programs beside each other."""
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


def ahead_tile(num_rows: int, num_out: int, num_in: int) -> AheadTile | None:
    """Choose a tile for a product whose weight is asked for before its rows are there, in place of `tile_of_summands`
    and with its parts; None where that is faster."""
    return _ahead_tile(num_rows, num_out, num_in, tile_of_summands(num_rows, num_out, num_in).splits)


def whole_ahead_tile(num_rows: int, num_out: int, num_in: int) -> AheadTile | None:
    """Likewise in place of `whole_tile`."""
    if num_rows > MOST_AT_ONCE:
        return None
    return _ahead_tile(num_rows, num_out, num_in, splits=1)


def _ahead_tile(num_rows: int, num_out: int, num_in: int, splits: int) -> AheadTile | None:
    are_few = num_rows <= MOST_ROWS
    outputs = 64 if are_few else 128  # of more rows, which are read less often by half as many programs
    programs = -(-num_out // outputs) * splits
    beside = -(-programs // MULTIPROCESSORS)
    if not are_few and (num_rows > MOST_AHEAD_ROWS or num_out * num_in < LEAST_NUMBERS):
        return None
    if beside > (MOST_BESIDE if are_few else 1):
        return None
    tile = AheadTile(outputs=outputs, num_stages=_steps(num_in, splits), splits=splits)
    return _with_room(tile, num_rows, Gate.NONE, beside=beside)


def gated_ahead_tile(num_rows: int, num_out: int, num_in: int) -> AheadTile | None:
    """Likewise in place of `gated_tile`."""
    if num_rows > MOST_ROWS:
        if num_rows > MOST_AHEAD_ROWS or num_out * num_in < LEAST_GATED_NUMBERS:
            return None
        return _with_room(AheadTile(outputs=64, num_stages=_steps(num_in, 1)), num_rows, Gate.GELU, beside=1)
    beside = -(-(num_out // 2) // (32 * MULTIPROCESSORS))
    if beside == MOST_BESIDE and num_rows > 16:  # rows are read less often by half as many programs
        return AheadTile(outputs=64, num_stages=2, most_registers=ROOM_FOR_TWO)
    # Programs that cannot be there at once have a multiprocessor to themselves, and so do their rings.
    tile = AheadTile(outputs=32, num_stages=_steps(num_in, 1))
    return _with_room(tile, num_rows, Gate.GELU, beside=beside if beside <= MOST_BESIDE else 1)


def _with_room(tile: AheadTile, num_rows: int, gate: Gate, *, beside: int) -> AheadTile:
    """The tile with a ring, and registers, of which so many lie beside each other."""
    room = RING_BYTES // beside // step_bytes(tile.outputs, num_rows, gate)
    return replace(tile, num_stages=min(MOST_STAGES, room, tile.num_stages), most_registers=REGISTERS[beside])


def _steps(num_in: int, splits: int) -> int:
    """Most steps of a part, or two."""
    return max(2, -(-num_in // STEP_INPUTS // splits))


def _splits(programs: int, tiles: int, num_in: int) -> int:
    return max(1, min(round(programs / tiles), num_in // LEAST_INPUTS, MOST_SPLITS))
