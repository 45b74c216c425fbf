"""Products with packed weights, bound by the weight's bytes: every program streams its own part once.

Words of codes come from global memory as they are and become numbers in registers, in the tensor cores' own order
(`packed_planes`). As in `gemray_kernels.triton.linear`, cuts depend on the weight's shape alone and every sum runs in
one order, so that a row's bits do not depend on its neighbours, here for up to 64 rows; a single row of four bits has a
kernel of its own where there is one (`packed_columns`), and other bits.

Shape legend: T rows, I inputs, O outputs, S splits of the inputs, B units, C words of a unit, R runs of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.triton.activation import gated_sums
from gemray_kernels.triton.dot import INTERPRETED, dot
from gemray_kernels.triton.early_start import let_next_start, starts_early, wait_for_inputs
from gemray_kernels.triton.linear import MOST_ROWS, Gate
from gemray_kernels.triton.packed_planes import e4m3, int8, plain_int4, scaled_e2m1, scaled_int4

CODES = {"int4": 0, "nvfp4": 1, "int8": 2, "fp8": 3}

LEAST_LEFT = 16
"""Rows that the tensor cores' left operand has at least."""
LEAST_RIGHT = 8
"""Rows that their right operand has at least."""


@dataclass(frozen=True)
class PackedTile:
    """What one program of a product holds, and into how many parts the inputs are cut."""

    outputs: int
    num_warps: int
    num_stages: int
    splits: int = 1
    units: int = 1
    """Units of a step, of weights that have whole steps of so many."""
    weight_first: bool = False
    """The weight is the left operand of the tile product."""
    early: bool = False
    """Whether programs start while the kernel before still runs; the next one's may start early in any case."""


def packed_linear_in_tiles(
    x_TI: Tensor, weight: TiledWeight, tile: PackedTile, *, out_dtype: torch.dtype, first: int = 0
) -> Tensor:
    """Summands [S, T, O - first] of ``x · weightᵀ``: the product is their `total`.

    Args:
        x_TI: at most 64 bfloat16 rows, inputs contiguous.
        weight: without a leading dimension.
        tile: of this weight's shape.
        out_dtype: of the summands; float32 unless there is only one.
        first: outputs that are left out.
    """
    num_out = weight.num_out - first
    out_STO = torch.empty(tile.splits, x_TI.shape[0], num_out, dtype=out_dtype, device=x_TI.device)
    _launch(x_TI, weight, first, out_STO, num_out, tile, Gate.NONE)
    return out_STO


def packed_gated_linear_in_tiles(x_TH: Tensor, weight: TiledWeight, tile: PackedTile, gate: Gate) -> Tensor:
    """``act(x · gateᵀ) · (x · upᵀ)`` [T, I] of ``weight = [gate; up]``, rounded as separate kernels round."""
    width = weight.num_out // 2
    out_TI = torch.empty(x_TH.shape[0], width, dtype=x_TH.dtype, device=x_TH.device)
    _launch(x_TH, weight, 0, out_TI.unsqueeze(0), width, tile, gate)
    return out_TI


def _launch(
    x_TI: Tensor, weight: TiledWeight, first: int, out_STO: Tensor, num_out: int, tile: PackedTile, gate: Gate
) -> None:
    num_rows, num_in = x_TI.shape
    if num_rows == 0:
        return
    if num_rows > MOST_ROWS or x_TI.stride(1) != 1 or num_in != weight.num_in:
        raise ValueError(
            f"x {list(x_TI.shape)} with strides {x_TI.stride()} and a weight of {weight.num_in} inputs: at most "
            f"{MOST_ROWS} rows of as many, one beside the other, are allowed"
        )
    unit, scale_BO = weight.unit, weight.scales_from(first)
    rows = max(LEAST_RIGHT if tile.weight_first else LEAST_LEFT, triton.next_power_of_2(num_rows))
    starts = starts_early(x_TI)
    early = tile.early and starts
    units = weight.words_BOC.shape[0]
    units_a_step = tile.units if units % tile.units == 0 else 1
    _packed_linear_kernel[(triton.cdiv(num_out, tile.outputs), tile.splits)](
        x_TI,
        weight.words_BOC[:, first:],
        scale_BO,
        weight.factor_O[first:],
        out_STO,
        num_rows,
        num_in,
        num_out,
        units // units_a_step,
        x_TI.stride(0),
        weight.words_BOC.stride(0),
        scale_BO.stride(0),
        CODE=CODES[weight.code],
        SCALING=weight.scaling.value,
        WORDS=unit.words,
        PLANES=unit.planes,
        RUNS=weight.runs,
        UNITS=units_a_step,
        GATE=gate.value,
        BLOCK_T=rows,
        BLOCK_O=tile.outputs,
        EVEN_I=num_in % unit.inputs == 0,
        EVEN_O=num_out % tile.outputs == 0,
        WEIGHT_FIRST=tile.weight_first or rows > 32,
        EARLY=early,
        LATE=starts and not early,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=early,
    )


@triton.jit  # type: ignore[untyped-decorator]
def tile_product(x, weight, acc, WEIGHT_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds one tile's product to `acc`, which is [O, T] or [T, O]."""
    if WEIGHT_FIRST:  # noqa: SIM108 - chosen at compile time
        result = dot(weight, x, acc)
    else:
        result = dot(x, weight, acc)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def add_unit(  # type: ignore[no-untyped-def]
    acc, x0, x1, x2, x3, words, scales, CODE: tl.constexpr, SCALING: tl.constexpr, WEIGHT_FIRST: tl.constexpr
):
    """Adds the product with a unit to `acc`.

    `x2` and `x3` are of codes with four planes; `scales` is of the kind that CODE and SCALING say.
    """
    part = acc
    if SCALING == 2:
        part = tl.zeros_like(acc)
    if CODE < 2:
        if CODE == 1:
            w0, w1, w2, w3 = scaled_e2m1(words, scales, WEIGHT_FIRST)
        elif SCALING == 1:
            w0, w1, w2, w3 = scaled_int4(words, scales)
        else:
            w0, w1, w2, w3 = plain_int4(words)
        part = tile_product(x0, w0, part, WEIGHT_FIRST)
        part = tile_product(x1, w1, part, WEIGHT_FIRST)
        part = tile_product(x2, w2, part, WEIGHT_FIRST)
        part = tile_product(x3, w3, part, WEIGHT_FIRST)
    else:
        if CODE == 2:
            w0, w1 = int8(words)
        else:
            w0, w1 = e4m3(words, WEIGHT_FIRST)
        part = tile_product(x0, w0, part, WEIGHT_FIRST)
        part = tile_product(x1, w1, part, WEIGHT_FIRST)
    if SCALING == 2:
        part = acc + part * scales
    elif WEIGHT_FIRST:
        part = finished(part)
    return part


@triton.jit
def finished(acc):  # type: ignore[no-untyped-def]
    """The same sums, complete.

    A tile product that reads its weight from registers may go on while the loop does, and Triton 3.6 then lets the next
    step write those registers: a use of the sums makes it wait.
    """
    if INTERPRETED:
        result = acc
    else:
        result = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def load_tile(at, mask, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads with zeros where the mask is false."""
    if MASKED:  # noqa: SIM108 - chosen at compile time
        tile = tl.load(at, mask=mask, other=0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def load_planes(  # type: ignore[no-untyped-def]
    x_at, left, c_x, is_row, PLANES: tl.constexpr, WORDS: tl.constexpr, EVEN_I: tl.constexpr
):
    """A unit's inputs, a tile for each plane; the last two are names where there are two planes.

    `left`: inputs that there are, of which `c_x` are the first plane's places, where EVEN_I does not say that units are
    whole.
    """
    if EVEN_I:
        x0 = tl.load(x_at, mask=is_row, other=0.0)
        x1 = tl.load(x_at + WORDS, mask=is_row, other=0.0)
        x2 = x0
        x3 = x0
        if PLANES == 4:
            x2 = tl.load(x_at + 2 * WORDS, mask=is_row, other=0.0)
            x3 = tl.load(x_at + 3 * WORDS, mask=is_row, other=0.0)
    else:
        # Places below a number, and not a difference above zero, of which Triton does not see how many are alike.
        x0 = tl.load(x_at, mask=is_row & (c_x < left), other=0.0)
        x1 = tl.load(x_at + WORDS, mask=is_row & (c_x < left - WORDS), other=0.0)
        x2 = x0
        x3 = x0
        if PLANES == 4:
            x2 = tl.load(x_at + 2 * WORDS, mask=is_row & (c_x < left - 2 * WORDS), other=0.0)
            x3 = tl.load(x_at + 3 * WORDS, mask=is_row & (c_x < left - 3 * WORDS), other=0.0)
    return x0, x1, x2, x3


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _packed_linear_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    x_TI,
    words_BOC,
    scale_BO,
    factor_O,
    out_STO,
    num_rows,
    num_in,
    num_out,
    steps,
    x_stride,
    words_stride,
    scale_stride,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    RUNS: tl.constexpr,
    UNITS: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    EVEN_I: tl.constexpr,
    EVEN_O: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
    LATE: tl.constexpr,
):
    split = tl.program_id(1)
    first_unit = split * steps // tl.num_programs(1) * UNITS
    end_unit = (split + 1) * steps // tl.num_programs(1) * UNITS
    o_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    in_out_O = o_O < num_out
    wait_for_inputs(EARLY)
    let_next_start(LATE)

    t_T = tl.arange(0, BLOCK_T)
    c_C = tl.arange(0, WORDS)
    r_R = tl.arange(0, RUNS)
    is_row_T = t_T < num_rows
    # Weight first: tiles are weight [O, C], x [C, T], sums [O, T]. Else x [T, C], weight [C, O], sums [T, O].
    if WEIGHT_FIRST:
        words_at = words_BOC + o_O[:, None] * WORDS + c_C[None, :]
        scale_at = scale_BO + o_O[:, None] * RUNS + r_R[None, :]
        factor_at = factor_O + o_O[:, None]
        x_at = x_TI + t_T.to(tl.int64)[None, :] * x_stride + c_C[:, None]
        c_x = c_C[:, None]
        in_out = in_out_O[:, None]
        is_row = is_row_T[None, :]
        acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
        up = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    else:
        words_at = words_BOC + o_O[None, :] * WORDS + c_C[:, None]
        scale_at = scale_BO + o_O[None, :] * RUNS + r_R[:, None]
        factor_at = factor_O + o_O[None, :]
        x_at = x_TI + t_T.to(tl.int64)[:, None] * x_stride + c_C[None, :]
        c_x = c_C[None, :]
        in_out = in_out_O[None, :]
        is_row = is_row_T[:, None]
        acc = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
        up = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for step in range(first_unit, end_unit, UNITS):
        for ahead in tl.static_range(UNITS):
            unit = step + ahead
            first = unit * (PLANES * WORDS)
            words_of_unit = words_at + unit * words_stride
            words = load_tile(words_of_unit, in_out, not EVEN_O)
            scales = words  # a name, where there are none
            if SCALING > 0:
                scales = load_tile(scale_at + unit * scale_stride, in_out, not EVEN_O)
            x0, x1, x2, x3 = load_planes(x_at + first, num_in - first, c_x, is_row, PLANES, WORDS, EVEN_I)
            acc = add_unit(acc, x0, x1, x2, x3, words, scales, CODE, SCALING, WEIGHT_FIRST)
            if GATE > 0:
                words = load_tile(words_of_unit + num_out * WORDS, in_out, not EVEN_O)
                scales = words
                if SCALING > 0:
                    scales = load_tile(scale_at + unit * scale_stride + num_out * RUNS, in_out, not EVEN_O)
                up = add_unit(up, x0, x1, x2, x3, words, scales, CODE, SCALING, WEIGHT_FIRST)

    dtype = out_STO.dtype.element_ty
    acc *= load_tile(factor_at, in_out, not EVEN_O)
    if GATE > 0:
        up *= load_tile(factor_at + num_out, in_out, not EVEN_O)
        acc = gated_sums(acc, up, dtype, GATE == 1)
    if WEIGHT_FIRST:
        to = t_T.to(tl.int64)[None, :] * num_out + o_O[:, None]
    else:
        to = t_T.to(tl.int64)[:, None] * num_out + o_O[None, :]
    to += split.to(tl.int64) * num_rows * num_out
    tl.store(out_STO + to, acc.to(dtype), mask=in_out & is_row)
