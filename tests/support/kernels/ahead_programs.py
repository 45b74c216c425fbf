"""What kernels are asked that ask for weights before the rows are there (`gemray_kernels.triton.packed_ring`)."""

from __future__ import annotations

import re

from gemray_kernels.triton.ahead_tile import NUM_WARPS, AheadTile
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS
from support.kernels.triton_compile import Compiled

_REGISTERS = 65536
"""Registers of a multiprocessor."""


def asked_around_wait(kernel: Compiled) -> list[int]:
    """How often a kernel asks the memory accelerator before and behind its wait for the kernel before; it lets the next
    one start before it waits."""
    before, after = kernel.ptx.split("griddepcontrol.wait", 1)
    assert "griddepcontrol.launch_dependents" in before
    return [len(re.findall(r"cp\.async\.bulk\.tensor", part)) for part in (before, after)]


def are_there_at_once(tile: AheadTile, num_out: int) -> bool:
    """Whether registers leave room for all programs of a product of so many outputs."""
    programs = -(-num_out // tile.outputs) * tile.splits
    room = _REGISTERS // (tile.most_registers * 32 * 2 * NUM_WARPS)
    return programs <= room * MULTIPROCESSORS
