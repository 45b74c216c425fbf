"""Exact products of few rows with packed weights: numbers are made in registers, in the order of plain ones.

A unit's planes are neighbouring inputs, one plane after the other, and each leaf begins with a unit of its own. So a
leaf's sum is the chain of tile products that `gemray_kernels.triton.exact_linear` computes of the same numbers, and has
its bits. Numbers are rounded where `packed_dequantize` rounds them, which writes them down for many rows.

Shape legend: T rows, I inputs, O outputs, S summands, B units, C words of a unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.packed_tiles import UNITS, TiledWeight
from gemray_kernels.triton.activation import gated_sums
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs
from gemray_kernels.triton.exact_packed_unit import add_exact_unit
from gemray_kernels.triton.linear import MOST_ROWS, Gate
from gemray_kernels.triton.packed_linear import (
    CODES,
    LEAST_LEFT,
    LEAST_RIGHT,
    load_planes,
    load_tile,
)


@dataclass(frozen=True)
class ExactPackedTile:
    """What one program of a product holds, and how many leaves it adds up: 1, 2, 4 or 8."""

    outputs: int
    num_warps: int
    num_stages: int
    leaves: int = 1
    weight_first: bool = False
    """The weight is the left operand of the tile product."""


def exact_packed_gated(x_TH: Tensor, weight: TiledWeight, tile: ExactPackedTile, gate: Gate) -> Tensor:
    """``act(x · gateᵀ) · (x · upᵀ)`` [T, I] of ``weight = [gate; up]``, rounded as separate kernels round.

    Args:
        x_TH: at most 64 bfloat16 rows, inputs contiguous.
        weight: without a leading dimension, of as many leaves as a program adds up.
        tile: of half of the weight's outputs.
        gate: the activation.

    Raises:
        ValueError: rows do not lie as said, or the leaves do not fit.
    """
    return _products(x_TH, weight, tile, weight.num_out // 2, x_TH.dtype, 0, gate)[0]


def exact_packed_summands(
    x_TI: Tensor, weight: TiledWeight, tile: ExactPackedTile, *, out_dtype: torch.dtype, first: int = 0
) -> Tensor:
    """Summands [S, T, O - first] of ``x · weightᵀ``, aligned subtrees of ``tile.leaves`` leaves in order.

    Args:
        x_TI: at most 64 bfloat16 rows, inputs contiguous.
        weight: without a leading dimension.
        tile: its leaves divide the weight's.
        out_dtype: of the summands; float32 unless there is only one.
        first: outputs that are left out.

    Raises:
        ValueError: rows do not lie as said, or the leaves do not fit.
    """
    return _products(x_TI, weight, tile, weight.num_out - first, out_dtype, first, Gate.NONE)


def _products(
    x_TI: Tensor,
    weight: TiledWeight,
    tile: ExactPackedTile,
    num_out: int,
    out_dtype: torch.dtype,
    first: int,
    gate: Gate,
) -> Tensor:
    num_rows, num_in = x_TI.shape
    if num_rows > MOST_ROWS or x_TI.stride(1) != 1 or num_in != weight.num_in or weight.leaves % tile.leaves:
        raise ValueError(
            f"x {list(x_TI.shape)} with strides {x_TI.stride()}, {tile.leaves} leaves a program, and a weight of "
            f"{weight.num_in} inputs in {weight.leaves} leaves: at most {MOST_ROWS} rows of as many inputs, one beside "
            f"the other, and even parts of the leaves are allowed"
        )
    out_STO = torch.empty(weight.leaves // tile.leaves, num_rows, num_out, dtype=out_dtype, device=x_TI.device)
    if num_rows == 0:
        return out_STO
    unit = UNITS[weight.code]
    early = starts_early(x_TI)
    align = 8 if weight.leaf % 8 == 0 else 1
    rows = max(LEAST_RIGHT if tile.weight_first else LEAST_LEFT, triton.next_power_of_2(num_rows))
    _exact_packed_kernel[(triton.cdiv(num_out, tile.outputs), len(out_STO))](
        x_TI,
        weight.words_BOC[:, first:],
        weight.scale_BO[..., first:],
        weight.factor_O[first:],
        out_STO,
        num_rows,
        num_out,
        weight.leaf // align,
        weight.place,
        weight.scale_BO.shape[0],
        x_TI.stride(0),
        weight.words_BOC.stride(0),
        weight.scale_BO.stride(0),
        tile.leaves // 2,
        GROUP=weight.group,
        ALIGN=align,
        UNITS=weight.units_of_leaf,
        LEAVES=tile.leaves,
        CODE=CODES[weight.code],
        SCALING=weight.scaling.value,
        WORDS=unit.words,
        PLANES=unit.planes,
        GATE=gate.value,
        BLOCK_T=rows,
        BLOCK_O=tile.outputs,
        EVEN_I=weight.leaf % unit.inputs == 0,
        EVEN_O=num_out % tile.outputs == 0,
        WEIGHT_FIRST=tile.weight_first or rows > 32,
        EARLY=early,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=early,
    )
    return out_STO


@triton.jit  # type: ignore[untyped-decorator]
def _leaf(  # type: ignore[no-untyped-def]
    x_at,
    words_at,
    scale_at,
    factor,
    is_row,
    in_out,
    c_x,
    leaf,
    place,
    groups,
    words_stride,
    scale_stride,
    GROUP: tl.constexpr,
    UNITS: tl.constexpr,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    EVEN_I: tl.constexpr,
    EVEN_O: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """One leaf's sum in a single accumulator, over its units in order; zeros behind its end change nothing."""
    acc = tl.zeros((in_out & is_row).shape, tl.float32)
    for unit in range(UNITS):
        words = load_tile(words_at + unit * words_stride, in_out, not EVEN_O)
        scales = words  # a name, where there are none
        if SCALING % 3 > 0:  # of planes or units
            scales = load_tile(scale_at + unit * scale_stride, in_out, not EVEN_O)
        first = unit * (PLANES * WORDS)
        x0, x1, x2, x3 = load_planes(x_at + first, leaf - first - c_x, is_row, PLANES, WORDS, EVEN_I)
        acc = add_exact_unit(
            acc, x0, x1, x2, x3, words, scales, factor, scale_at, in_out, place + first, groups, scale_stride, GROUP,
            CODE, SCALING, WORDS, WEIGHT_FIRST,
        )  # fmt: skip
    if CODE == 0 and SCALING == 1:
        acc *= factor  # 2^21, which rounds nothing
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def packed_subtree(  # type: ignore[no-untyped-def]
    x_at,
    words_at,
    scale_at,
    factor,
    is_row,
    in_out,
    c_x,
    leaf,
    place,
    groups,
    words_stride,
    scale_stride,
    num_twins,
    GROUP: tl.constexpr,
    UNITS: tl.constexpr,
    LEAVES: tl.constexpr,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    EVEN_I: tl.constexpr,
    EVEN_O: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """Sums of LEAVES leaves, added by the tree: [O, T] where the weight is first, else [T, O].

    Args:
        x_at: the rows' first words' inputs, as tiles of one plane; of the first of these leaves.
        words_at: the outputs' words of that leaf's first unit.
        scale_at: its scales.
        factor: float32, of each output.
        is_row, in_out: which rows and outputs there are.
        c_x: places of the words along the tile of rows.
        leaf: inputs of a leaf, which has UNITS units.
        place: as of `scaled_by_place`, of the words along the tile of the weight.
        groups: as there, with strides and GROUP.
        num_twins: half of LEAVES, as an argument of the launch.
    """
    if LEAVES == 1:
        result = _leaf(
            x_at, words_at, scale_at, factor, is_row, in_out, c_x, leaf, place, groups, words_stride, scale_stride,
            GROUP, UNITS, CODE, SCALING, WORDS, PLANES, EVEN_I, EVEN_O, WEIGHT_FIRST,
        )  # fmt: skip
    else:
        # Sums of two leaves and of four that wait for their neighbours to the right.
        two = tl.zeros((in_out & is_row).shape, tl.float32)
        four = tl.zeros((in_out & is_row).shape, tl.float32)
        result = tl.zeros((in_out & is_row).shape, tl.float32)
        # Not LEAVES // 2, which ptxas would know: see `dot`.
        for twins in range(num_twins):
            result = _leaf(
                x_at, words_at, scale_at, factor, is_row, in_out, c_x, leaf, place, groups, words_stride, scale_stride,
                GROUP, UNITS, CODE, SCALING, WORDS, PLANES, EVEN_I, EVEN_O, WEIGHT_FIRST,
            )  # fmt: skip
            x_at += leaf
            words_at += UNITS * words_stride
            place += leaf
            if SCALING < 3:
                scale_at += UNITS * scale_stride
            result += _leaf(
                x_at, words_at, scale_at, factor, is_row, in_out, c_x, leaf, place, groups, words_stride, scale_stride,
                GROUP, UNITS, CODE, SCALING, WORDS, PLANES, EVEN_I, EVEN_O, WEIGHT_FIRST,
            )  # fmt: skip
            x_at += leaf
            words_at += UNITS * words_stride
            place += leaf
            if SCALING < 3:
                scale_at += UNITS * scale_stride
            if twins % 2 == 0:
                two = result
            else:
                result += two
                if twins % 4 == 1:
                    four = result
                else:
                    result += four
    return result


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _exact_packed_kernel(  # type: ignore[no-untyped-def]
    x_TI,
    words_BOC,
    scale_BO,
    factor_O,
    out_STO,
    num_rows,
    num_out,
    leaf_units,
    place,
    groups,
    x_stride,
    words_stride,
    scale_stride,
    num_twins,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
    UNITS: tl.constexpr,
    LEAVES: tl.constexpr,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    EVEN_I: tl.constexpr,
    EVEN_O: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
):
    leaf = leaf_units * ALIGN
    first_leaf = tl.program_id(1) * LEAVES
    place += first_leaf * leaf
    o_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    t_T = tl.arange(0, BLOCK_T)
    c_C = tl.arange(0, WORDS)
    in_out_O = o_O < num_out
    is_row_T = t_T < num_rows
    words_BOC += first_leaf * UNITS * words_stride
    if SCALING < 3:
        scale_BO += first_leaf * UNITS * scale_stride
    x_TI += first_leaf * leaf
    out_TO = out_STO + tl.program_id(1).to(tl.int64) * num_rows * num_out
    # Weight first: tiles are weight [O, C], x [C, T], sums [O, T]. Else x [T, C], weight [C, O], sums [T, O].
    if WEIGHT_FIRST:
        words_at = words_BOC + o_O[:, None] * WORDS + c_C[None, :]
        scale_at = scale_BO + o_O[:, None]
        factor_at = factor_O + o_O[:, None]
        x_at = x_TI + t_T.to(tl.int64)[None, :] * x_stride + c_C[:, None]
        to = out_TO + t_T.to(tl.int64)[None, :] * num_out + o_O[:, None]
        c_x = c_C[:, None]
        place += c_C[None, :]
        in_out = in_out_O[:, None]
        is_row = is_row_T[None, :]
    else:
        words_at = words_BOC + o_O[None, :] * WORDS + c_C[:, None]
        scale_at = scale_BO + o_O[None, :]
        factor_at = factor_O + o_O[None, :]
        x_at = x_TI + t_T.to(tl.int64)[:, None] * x_stride + c_C[None, :]
        to = out_TO + t_T.to(tl.int64)[:, None] * num_out + o_O[None, :]
        c_x = c_C[None, :]
        place += c_C[:, None]
        in_out = in_out_O[None, :]
        is_row = is_row_T[:, None]
    factor = load_tile(factor_at, in_out, not EVEN_O)
    wait_for_inputs(EARLY)
    result = packed_subtree(
        x_at, words_at, scale_at, factor, is_row, in_out, c_x, leaf, place, groups, words_stride, scale_stride,
        num_twins, GROUP, UNITS, LEAVES, CODE, SCALING, WORDS, PLANES, EVEN_I, EVEN_O, WEIGHT_FIRST,
    )  # fmt: skip
    dtype = out_STO.dtype.element_ty
    if GATE > 0:
        factor = load_tile(factor_at + num_out, in_out, not EVEN_O)
        up = packed_subtree(
            x_at, words_at + num_out * WORDS, scale_at + num_out, factor, is_row, in_out, c_x, leaf, place, groups,
            words_stride, scale_stride, num_twins, GROUP, UNITS, LEAVES, CODE, SCALING, WORDS, PLANES, EVEN_I, EVEN_O,
            WEIGHT_FIRST,
        )  # fmt: skip
        result = gated_sums(result, up, dtype, GATE == 1)
    tl.store(to, result.to(dtype), mask=in_out & is_row)
