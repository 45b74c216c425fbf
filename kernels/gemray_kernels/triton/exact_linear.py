"""Linear layers in exact numerics: tiles whose sums run in the order of `gemray_kernels.numerics`, whatever the tile.

On sm_90 a chain of tile products into one float32 accumulator has the same bits for every shape of tile, either kind
of tensor instruction and either operand first (measured; `tests/gpu/test_exact_products_gpu.py` holds it). So a tile
follows the number of rows, and how many leaves a program adds up follows what keeps the device at work.

Shape legend: T rows, I inputs, O outputs, S summands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.triton.dot import dot
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs


@dataclass(frozen=True)
class ExactTile:
    """What one program of a product holds, and how many leaves it adds up."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    leaves: int = 1
    weight_first: bool = True
    """The weight is the left operand of the tile product."""
    group: int = 8
    """Tiles of rows that run side by side over the same outputs, so that they find them in the cache."""


def exact_summands_in_tiles(
    x_TI: Tensor, weight_OI: Tensor, leaves: int, tile: ExactTile, out_dtype: torch.dtype
) -> Tensor:
    """Summands [S, T, O] of ``x · weightᵀ``, aligned subtrees of ``tile.leaves`` leaves in order.

    Args:
        x_TI: any number of rows, inputs contiguous.
        weight_OI: inputs contiguous, of the same dtype.
        leaves: into which the inputs are cut.
        tile: with at most so many leaves.
        out_dtype: of the summands; float32 unless there is only one.

    Raises:
        ValueError: a tensor does not lie as said, or the leaves do not fit.
    """
    num_rows, num_in = x_TI.shape
    num_out = weight_OI.shape[0]
    if x_TI.stride(1) != 1 or weight_OI.stride(1) != 1 or x_TI.dtype != weight_OI.dtype:
        raise ValueError(
            f"x {list(x_TI.shape)} {x_TI.dtype} and weight {list(weight_OI.shape)} {weight_OI.dtype} of strides "
            f"{x_TI.stride()} and {weight_OI.stride()}: contiguous inputs and weights of one dtype are allowed"
        )
    if num_in % leaves or leaves % tile.leaves:
        raise ValueError(f"{leaves} leaves of {num_in} inputs, {tile.leaves} a program: even parts are allowed")
    out_STO = torch.empty(leaves // tile.leaves, num_rows, num_out, dtype=out_dtype, device=x_TI.device)
    if num_rows == 0:
        return out_STO
    leaf = num_in // leaves
    unit = 8 if leaf % 8 == 0 else 1
    early = starts_early(x_TI)
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.outputs)
    _exact_linear_kernel[(tiles, leaves // tile.leaves)](
        x_TI,
        weight_OI,
        out_STO,
        num_rows,
        num_out,
        x_TI.stride(0),
        weight_OI.stride(0),
        leaf // unit,
        UNIT=unit,
        LEAVES=tile.leaves,
        BLOCK_T=tile.rows,
        BLOCK_O=tile.outputs,
        BLOCK_I=tile.inputs,
        GROUP=tile.group,
        EVEN_I=leaf % tile.inputs == 0,
        EVEN_O=num_out % tile.outputs == 0,
        WEIGHT_FIRST=tile.weight_first,
        EARLY=early,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=early,
    )
    return out_STO


@triton.jit  # type: ignore[untyped-decorator]
def _leaf(  # type: ignore[no-untyped-def]
    x_at,
    weight_at,
    leaf,
    is_row,
    in_out,
    SHAPE_0: tl.constexpr,
    SHAPE_1: tl.constexpr,
    BLOCK_I: tl.constexpr,
    EVEN_I: tl.constexpr,
    EVEN_O: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """One leaf's sum in a single accumulator, over its inputs in order; zeros behind its end change nothing."""
    acc = tl.zeros([SHAPE_0, SHAPE_1], tl.float32)
    i_I = tl.arange(0, BLOCK_I)
    for first in range(0, leaf, BLOCK_I):
        if EVEN_I:
            x_mask = is_row
            weight_mask = in_out
        elif WEIGHT_FIRST:
            x_mask = is_row & (first + i_I < leaf)[:, None]
            weight_mask = in_out & (first + i_I < leaf)[None, :]
        else:
            x_mask = is_row & (first + i_I < leaf)[None, :]
            weight_mask = in_out & (first + i_I < leaf)[:, None]
        x = tl.load(x_at + first, mask=x_mask, other=0.0)
        if EVEN_I and EVEN_O:
            weight = tl.load(weight_at + first)
        else:
            weight = tl.load(weight_at + first, mask=weight_mask, other=0.0)
        if WEIGHT_FIRST:  # noqa: SIM108 - chosen at compile time
            acc = dot(weight, x, acc)
        else:
            acc = dot(x, weight, acc)
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _subtree(  # type: ignore[no-untyped-def]
    x_at,
    weight_at,
    leaf,
    is_row,
    in_out,
    LEAVES: tl.constexpr,
    SHAPE_0: tl.constexpr,
    SHAPE_1: tl.constexpr,
    BLOCK_I: tl.constexpr,
    EVEN_I: tl.constexpr,
    EVEN_O: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """Sum of LEAVES leaves by the tree."""
    if LEAVES == 1:
        acc = _leaf(
            x_at, weight_at, leaf, is_row, in_out, SHAPE_0, SHAPE_1, BLOCK_I, EVEN_I, EVEN_O, WEIGHT_FIRST
        )  # fmt: skip
    else:
        HALF: tl.constexpr = LEAVES // 2
        left = _subtree(
            x_at, weight_at, leaf, is_row, in_out, HALF, SHAPE_0, SHAPE_1, BLOCK_I, EVEN_I, EVEN_O, WEIGHT_FIRST
        )  # fmt: skip
        x_at += HALF * leaf
        weight_at += HALF * leaf
        acc = left + _subtree(
            x_at, weight_at, leaf, is_row, in_out, HALF, SHAPE_0, SHAPE_1, BLOCK_I, EVEN_I, EVEN_O, WEIGHT_FIRST
        )  # fmt: skip
    return acc


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _exact_linear_kernel(  # type: ignore[no-untyped-def]
    x_TI,
    weight_OI,
    out_STO,
    num_rows,
    num_out,
    x_stride,
    weight_stride,
    leaf_units,
    UNIT: tl.constexpr,
    LEAVES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_I: tl.constexpr,
    EVEN_O: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Programs of GROUP tiles of rows take one tile of outputs after the other.
    row_tiles = tl.cdiv(num_rows, BLOCK_T)
    together = GROUP * tl.cdiv(num_out, BLOCK_O)
    first_tile = tl.program_id(0) // together * GROUP
    side_by_side = tl.minimum(row_tiles - first_tile, GROUP)
    row_tile = first_tile + tl.program_id(0) % together % side_by_side
    out_tile = tl.program_id(0) % together // side_by_side

    leaf = leaf_units * UNIT
    first = tl.program_id(1) * LEAVES * leaf
    o_O = out_tile * BLOCK_O + tl.arange(0, BLOCK_O)
    t_T = row_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    i_I = tl.arange(0, BLOCK_I)
    weight_at_O = weight_OI + o_O.to(tl.int64) * weight_stride + first
    wait_for_inputs(EARLY)
    x_at_T = x_TI + t_T.to(tl.int64) * x_stride + first
    in_out_O = o_O < num_out
    is_row_T = t_T < num_rows
    out_at = out_STO + tl.program_id(1).to(tl.int64) * num_rows * num_out
    # Weight first: tiles are weight [O, I], x [I, T], sums [O, T]. Else x [T, I], weight [I, O], sums [T, O].
    if WEIGHT_FIRST:
        acc = _subtree(
            x_at_T[None, :] + i_I[:, None],
            weight_at_O[:, None] + i_I[None, :],
            leaf,
            is_row_T[None, :],
            in_out_O[:, None],
            LEAVES,
            BLOCK_O,
            BLOCK_T,
            BLOCK_I,
            EVEN_I,
            EVEN_O,
            True,
        )
        to = t_T.to(tl.int64)[None, :] * num_out + o_O[:, None]
        inside = is_row_T[None, :] & in_out_O[:, None]
    else:
        acc = _subtree(
            x_at_T[:, None] + i_I[None, :],
            weight_at_O[None, :] + i_I[:, None],
            leaf,
            is_row_T[:, None],
            in_out_O[None, :],
            LEAVES,
            BLOCK_T,
            BLOCK_O,
            BLOCK_I,
            EVEN_I,
            EVEN_O,
            False,
        )
        to = t_T.to(tl.int64)[:, None] * num_out + o_O[None, :]
        inside = is_row_T[:, None] & in_out_O[None, :]
    tl.store(out_at + to, acc.to(out_STO.dtype.element_ty), mask=inside)
