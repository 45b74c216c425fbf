"""Tiles of products that ask for weights before the rows are there, by a warp that fills a ring while others multiply
(`linear_ahead`, `packed_ahead`, `packed_columns`): what a program holds, which part is its own, and who has registers.
"""

# A kernel's arguments have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FETCH_REGISTERS = 24
NUM_WARPS = 4
"""That multiply."""
MOST_REGISTERS = 56
"""Registers of a thread: those of the three warps beside the fetching one are left to those that multiply."""
ROOM_FOR_THREE = 72
"""Registers of a thread that leave room for three programs on a multiprocessor."""
ROOM_FOR_TWO = 96
"""Registers of a thread that leave room for two programs on a multiprocessor, and for no third."""


@dataclass(frozen=True)
class AheadTile:
    """What one program of a product holds, and into how many parts the inputs are cut."""

    outputs: int
    """A multiple of 64, 16 for each warp that multiplies; or of 32 where those of plain weights are gated."""
    num_stages: int
    """Steps of a ring."""
    splits: int = 1
    most_registers: int = MOST_REGISTERS
    """Registers of a thread: four programs on a multiprocessor are left room for, or fewer."""


def require_one_part(tile: AheadTile) -> None:
    """Refuse a gated product of parts: only whole sums are gated."""
    if tile.splits != 1:
        raise ValueError(f"{tile} of a gated product: one part is allowed")


@gluon.jit
def part_of_program(steps, num_out, SHAPE: gl.constexpr):
    """A program's split, and its first step, the one behind its last, its first output and how many there are."""
    split = gl.program_id(1)
    first = split * steps // gl.num_programs(1)
    end = (split + 1) * steps // gl.num_programs(1)
    return split, (first, end, gl.program_id(0) * SHAPE.outputs, num_out)
