"""Exact products of few rows with packed weights: numbers are made in registers, in the order of plain ones.

Sums are those of `exact_packed_tree`. Numbers are rounded as `packed_dequantize` rounds them, which writes them down
for many rows.

Shape legend: T rows, I inputs, O outputs, S summands, B units, C words of a unit, R runs of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.triton.activation import gated_sums
from gemray_kernels.triton.early_start import let_next_start, starts_early, wait_for_inputs
from gemray_kernels.triton.exact_packed_tree import packed_subtree
from gemray_kernels.triton.linear import MOST_ROWS, Gate
from gemray_kernels.triton.packed_linear import (
    CODES,
    LEAST_LEFT,
    LEAST_RIGHT,
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
    units: int = 1
    """Units of a step, of leaves that have several whole steps of so many."""
    early: bool = False
    """Whether programs start while the kernel before still runs; the next one's may start early in any case."""


def exact_packed_gated(x_TH: Tensor, weight: TiledWeight, tile: ExactPackedTile, gate: Gate) -> Tensor:
    """``act(x · gateᵀ) · (x · upᵀ)`` [T, I] of ``weight = [gate; up]``, rounded as separate kernels round.

    Args:
        x_TH: at most 64 bfloat16 rows, inputs contiguous.
        weight: without a leading dimension, of one leaf.
        tile: of half of the weight's outputs, and of one leaf.
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
    fits = weight.leaves % tile.leaves == 0 and (gate is Gate.NONE or weight.leaves == 1)
    if num_rows > MOST_ROWS or x_TI.stride(1) != 1 or num_in != weight.num_in or not fits:
        raise ValueError(
            f"x {list(x_TI.shape)} with strides {x_TI.stride()}, {tile.leaves} leaves a program, and a weight of "
            f"{weight.num_in} inputs in {weight.leaves} leaves: at most {MOST_ROWS} rows of as many inputs, one beside "
            f"the other, and even parts of the leaves (one, where they are gated) are allowed"
        )
    out_STO = torch.empty(weight.leaves // tile.leaves, num_rows, num_out, dtype=out_dtype, device=x_TI.device)
    if num_rows == 0:
        return out_STO
    unit, scale_BO = weight.unit, weight.scales_from(first)
    units = weight.units_of_leaf
    step = tile.units if units % tile.units == 0 and units > tile.units else 1
    starts = starts_early(x_TI)
    early = tile.early and starts
    align = 8 if weight.leaf % 8 == 0 else 1
    rows = max(LEAST_RIGHT if tile.weight_first else LEAST_LEFT, triton.next_power_of_2(num_rows))
    _exact_packed_kernel[(triton.cdiv(num_out, tile.outputs), len(out_STO))](
        x_TI,
        weight.words_BOC[:, first:],
        scale_BO,
        weight.factor_O[first:],
        weight.parts_or_factors[first:],
        out_STO,
        num_rows,
        num_out,
        weight.leaf // align,
        units,
        weight.place,
        weight.scale_BO.shape[0],
        x_TI.stride(0),
        weight.words_BOC.stride(0),
        scale_BO.stride(0),
        0,
        tile.leaves // 2,
        GROUP=weight.group,
        ALIGN=align,
        STEP=step,
        IN_ONE_STEP=False,
        LEAVES=tile.leaves,
        CODE=CODES[weight.code],
        SCALING=weight.scaling.value,
        PARTS=weight.parts,
        WORDS=unit.words,
        PLANES=unit.planes,
        RUNS=weight.runs,
        GATE=gate.value,
        BLOCK_T=rows,
        BLOCK_O=tile.outputs,
        EVEN_I=weight.leaf % unit.inputs == 0,
        EVEN_O=num_out % tile.outputs == 0,
        WEIGHT_FIRST=tile.weight_first or rows > 32,
        EARLY=early,
        LATE=starts and not early,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=early,
    )
    return out_STO


@triton.jit(do_not_specialize=["num_rows", "units", "groups"])  # type: ignore[untyped-decorator]
def _exact_packed_kernel(  # type: ignore[no-untyped-def]
    x_TI,
    words_BOC,
    scale_BO,
    factor_O,
    parts_O,
    out_STO,
    num_rows,
    num_out,
    leaf_units,
    units,
    place,
    groups,
    x_stride,
    words_stride,
    scale_stride,
    parts_stride,
    num_twins,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
    STEP: tl.constexpr,
    IN_ONE_STEP: tl.constexpr,
    LEAVES: tl.constexpr,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    RUNS: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    EVEN_I: tl.constexpr,
    EVEN_O: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
    LATE: tl.constexpr,
):
    leaf = leaf_units * ALIGN
    first_leaf = tl.program_id(1) * LEAVES
    place += first_leaf * leaf
    o_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    t_T = tl.arange(0, BLOCK_T)
    c_C = tl.arange(0, WORDS)
    r_R = tl.arange(0, RUNS)
    in_out_O = o_O < num_out
    is_row_T = t_T < num_rows
    words_BOC += first_leaf * units * words_stride
    if SCALING < 3:
        scale_BO += first_leaf * units * scale_stride
    x_TI += first_leaf * leaf
    out_TO = out_STO + tl.program_id(1).to(tl.int64) * num_rows * num_out
    # Weight first: tiles are weight [O, C], x [C, T], sums [O, T]. Else x [T, C], weight [C, O], sums [T, O].
    if WEIGHT_FIRST:
        words_at = words_BOC + o_O[:, None] * WORDS + c_C[None, :]
        scale_at = scale_BO + o_O[:, None] * RUNS + r_R[None, :]
        factor_at = factor_O + o_O[:, None]
        parts_at = parts_O + o_O[:, None]
        x_at = x_TI + t_T.to(tl.int64)[None, :] * x_stride + c_C[:, None]
        to = out_TO + t_T.to(tl.int64)[None, :] * num_out + o_O[:, None]
        c_x = c_C[:, None]
        place += c_C[None, :]
        in_out = in_out_O[:, None]
        is_row = is_row_T[None, :]
    else:
        words_at = words_BOC + o_O[None, :] * WORDS + c_C[:, None]
        scale_at = scale_BO + o_O[None, :] * RUNS + r_R[:, None]
        factor_at = factor_O + o_O[None, :]
        parts_at = parts_O + o_O[None, :]
        x_at = x_TI + t_T.to(tl.int64)[:, None] * x_stride + c_C[None, :]
        to = out_TO + t_T.to(tl.int64)[:, None] * num_out + o_O[None, :]
        c_x = c_C[None, :]
        place += c_C[:, None]
        in_out = in_out_O[None, :]
        is_row = is_row_T[:, None]
    wait_for_inputs(EARLY)
    let_next_start(LATE)
    result, up = packed_subtree(
        x_at, words_at, scale_at, factor_at, parts_at, is_row, in_out, c_x, leaf, units, place, groups, words_stride,
        scale_stride, parts_stride, num_twins, num_out, GROUP, STEP, IN_ONE_STEP, LEAVES, CODE, SCALING, PARTS, WORDS,
        PLANES, RUNS, GATE > 0, EVEN_I, EVEN_O, WEIGHT_FIRST,
    )  # fmt: skip
    dtype = out_STO.dtype.element_ty
    if GATE > 0:
        result = gated_sums(result, up, dtype, GATE == 1)
    tl.store(to, result.to(dtype), mask=in_out & is_row)
