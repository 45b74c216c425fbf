"""Adds up what shares of a product's tiles have of their sums (`packed_even`), in the order of the inputs.

Shape legend: T rows, O results, P parts of tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.triton.activation import gated_sums
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs
from gemray_kernels.triton.linear import Gate

BLOCK_O = 16
BLOCK_T = 32


def add_rest(
    parts_P: Tensor,
    factor_O: Tensor,
    out_TO: Tensor,
    *,
    groups: int,
    outputs: int,
    rows: int,
    programs: int,
    steps: int,
    first_tile: int,
    rest: int,
    gate: Gate,
    factor: float,
) -> None:
    """Write the results of the tiles that were cut into shares.

    Args:
        parts_P: float32 [2 · programs, groups · outputs · rows]: two of each program, by tile.
        factor_O: of each output's sum.
        out_TO: where results go.
        groups: of a tile.
        outputs: of a group, gate and up rows by eights.
        rows: of a tile, at least those of the results.
        programs: that have a share each.
        steps: of a tile.
        first_tile: of those that were cut.
        rest: how many there are.
        gate: of the results.
        factor: of all sums.
    """
    num_rows, num_out = out_TO.shape
    gated = gate is not Gate.NONE
    results = outputs // 2 if gated else outputs
    early = starts_early(out_TO)
    _add_rest_kernel[(rest * groups * results // BLOCK_O, triton.cdiv(num_rows, BLOCK_T))](
        parts_P,
        factor_O,
        out_TO,
        num_rows,
        num_out,
        programs,
        steps,
        first_tile,
        rest,
        factor,
        GROUPS=groups,
        OUTPUTS=outputs,
        RESULTS=results,
        ROWS=rows,
        GATE=gate.value,
        BLOCK_O=BLOCK_O,
        BLOCK_T=BLOCK_T,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _add_parts(  # type: ignore[no-untyped-def]
    parts_P, at_OT, tile, programs, steps, rest, PART: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Sums [O, T] of a tile, at these places of its parts."""
    # The programs whose shares hold the first and the last of the tile's steps.
    work = rest * steps
    first = ((tile * steps + 1) * programs - 1) // work
    last = ((tile + 1) * steps * programs - 1) // work
    sum_OT = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for program in range(first, last + 1):
        begin = program * work // programs
        # Where there are fewer steps than programs, some have none.
        if (program + 1) * work // programs > begin:
            slot = 2 * program + tile - begin // steps
            sum_OT += tl.load(parts_P + slot.to(tl.int64) * PART + at_OT)
    return sum_OT


@triton.jit(do_not_specialize=["num_rows", "programs", "steps", "first_tile", "rest"])  # type: ignore[untyped-decorator]
def _add_rest_kernel(  # type: ignore[no-untyped-def]
    parts_P,
    factor_O,
    out_TO,
    num_rows,
    num_out,
    programs,
    steps,
    first_tile,
    rest,
    factor,
    GROUPS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RESULTS: tl.constexpr,
    ROWS: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    EARLY: tl.constexpr,
):
    of_group: tl.constexpr = RESULTS // BLOCK_O
    block = tl.program_id(0)
    group = block // of_group
    r_O = block % of_group * BLOCK_O + tl.arange(0, BLOCK_O)
    o_O = (first_tile * GROUPS + group) * RESULTS + r_O
    t_T = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    factor_at_O = factor_O + tl.minimum(o_O, num_out - 1)
    factor_1 = tl.load(factor_at_O)[:, None]
    place_O = r_O
    if GATE:
        up_factor_1 = tl.load(factor_at_O + num_out)[:, None]
        place_O = r_O // 8 * 16 + r_O % 8
    # Rows behind the tile's are not stored, and their places are others'.
    at_OT = (group % GROUPS * OUTPUTS + place_O)[:, None] * ROWS + tl.minimum(t_T, ROWS - 1)[None, :]
    PART: tl.constexpr = GROUPS * OUTPUTS * ROWS
    wait_for_inputs(EARLY)
    tile = group // GROUPS
    sum_OT = _add_parts(parts_P, at_OT, tile, programs, steps, rest, PART, BLOCK_O, BLOCK_T) * factor * factor_1
    if GATE:
        at_OT += 8 * ROWS
        up_OT = _add_parts(parts_P, at_OT, tile, programs, steps, rest, PART, BLOCK_O, BLOCK_T) * factor * up_factor_1
        sum_OT = gated_sums(sum_OT, up_OT, out_TO.dtype.element_ty, GATE == 1)
    is_there = (o_O < num_out)[:, None] & (t_T < num_rows)[None, :]
    at_TO = out_TO + t_T.to(tl.int64)[None, :] * num_out + o_O[:, None]
    tl.store(at_TO, sum_OT.to(out_TO.dtype.element_ty), mask=is_there)
