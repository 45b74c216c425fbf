"""Linear layers of few rows, bound by the weight's bytes: every program streams its own part of the weight once.

The outputs, and where they are few the inputs too, are cut at places that depend on the weight's shape alone, and every
sum runs in one order whatever the number of rows. So a row's bits do not depend on its neighbours.

Shape legend: T rows, I inputs, O outputs, S splits of the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.triton.activation import gated_sums
from gemray_kernels.triton.dot import dot
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs

MOST_ROWS = 64
"""More rows are the business of products that reuse weights."""


@dataclass(frozen=True)
class LinearTile:
    """What one program of a product holds, and into how many parts the inputs are cut."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    splits: int = 1
    weight_first: bool = True
    """The weight is the left operand of the tile product: wgmma then reads it from shared memory, 64 outputs a time."""
    early: bool = True
    """Whether programs start while the kernel before still runs; they ask for nothing before they wait."""


class Gate(Enum):
    """What becomes of a product whose weight holds gate rows above up rows."""

    NONE = 0
    GELU = 1
    SILU = 2


def linear_in_tiles(x_TI: Tensor, weight_OI: Tensor, tile: LinearTile, *, out_dtype: torch.dtype) -> Tensor:
    """Summands [S, T, O] of ``x · weightᵀ``: the product is their `total`.

    Args:
        x_TI: at most 64 rows, inputs contiguous.
        weight_OI: contiguous.
        tile: of this weight's shape.
        out_dtype: of the summands; float32 unless there is only one.
    """
    num_rows, num_out = x_TI.shape[0], weight_OI.shape[0]
    out_STO = torch.empty(tile.splits, num_rows, num_out, dtype=out_dtype, device=x_TI.device)
    _launch(x_TI, weight_OI, out_STO, num_out, tile, Gate.NONE)
    return out_STO


def gated_linear_in_tiles(x_TH: Tensor, weight_2IH: Tensor, tile: LinearTile, gate: Gate) -> Tensor:
    """``act(x · gateᵀ) · (x · upᵀ)`` [T, I] of ``weight = [gate; up]``, rounded as separate kernels round."""
    num_rows, width = x_TH.shape[0], weight_2IH.shape[0] // 2
    out_TI = torch.empty(num_rows, width, dtype=x_TH.dtype, device=x_TH.device)
    _launch(x_TH, weight_2IH, out_TI.unsqueeze(0), width, tile, gate)
    return out_TI


def _launch(x_TI: Tensor, weight_OI: Tensor, out_STO: Tensor, num_out: int, tile: LinearTile, gate: Gate) -> None:
    num_rows, num_in = x_TI.shape
    if num_rows == 0:
        return
    if num_rows > MOST_ROWS or x_TI.stride(1) != 1 or not weight_OI.is_contiguous() or x_TI.dtype != weight_OI.dtype:
        raise ValueError(
            f"x {list(x_TI.shape)} {x_TI.dtype} and weight {list(weight_OI.shape)} {weight_OI.dtype}: at most "
            f"{MOST_ROWS} rows of contiguous inputs and a contiguous weight of the same dtype are allowed"
        )
    early = tile.early and starts_early(x_TI)
    _linear_kernel[(triton.cdiv(num_out, tile.outputs), tile.splits)](
        x_TI,
        weight_OI,
        out_STO,
        num_rows,
        num_in,
        num_out,
        x_TI.stride(0),
        GATE=gate.value,
        BLOCK_T=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_O=tile.outputs,
        BLOCK_I=tile.inputs,
        EVEN_I=num_in % tile.inputs == 0,
        EVEN_O=num_out % tile.outputs == 0,
        WEIGHT_FIRST=tile.weight_first,
        EARLY=early,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=early,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _tile_product(x, weight, acc, WEIGHT_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds one tile's product to `acc`, which is [O, T] or [T, O]."""
    if WEIGHT_FIRST:  # noqa: SIM108 - chosen at compile time
        result = dot(weight, x, acc)
    else:
        result = dot(x, weight, acc)
    return result


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _linear_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0912, PLR0915
    x_TI,
    weight_OI,
    out_STO,
    num_rows,
    num_in,
    num_out,
    x_stride,
    GATE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    EVEN_I: tl.constexpr,
    EVEN_O: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
):
    split = tl.program_id(1)
    blocks = tl.cdiv(num_in, BLOCK_I)
    first_block = split * blocks // tl.num_programs(1)
    end_block = (split + 1) * blocks // tl.num_programs(1)
    o_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    in_out_O = o_O < num_out
    weight_at_O = weight_OI + o_O.to(tl.int64) * num_in
    up_at_O = weight_at_O + num_out.to(tl.int64) * num_in
    wait_for_inputs(EARLY)

    t_T = tl.arange(0, BLOCK_T)
    i_I = tl.arange(0, BLOCK_I)
    is_row_T = t_T < num_rows
    # Weight first: tiles are weight [O, I], x [I, T], sums [O, T]. Else x [T, I], weight [I, O], sums [T, O].
    if WEIGHT_FIRST:
        weight_at = weight_at_O[:, None] + i_I[None, :]
        up_at = up_at_O[:, None] + i_I[None, :]
        x_at = x_TI + t_T.to(tl.int64)[None, :] * x_stride + i_I[:, None]
        in_out = in_out_O[:, None]
        is_row = is_row_T[None, :]
        acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
        up = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    else:
        weight_at = weight_at_O[None, :] + i_I[:, None]
        up_at = up_at_O[None, :] + i_I[:, None]
        x_at = x_TI + t_T.to(tl.int64)[:, None] * x_stride + i_I[None, :]
        in_out = in_out_O[None, :]
        is_row = is_row_T[:, None]
        acc = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
        up = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for block in range(first_block, end_block):
        first = block * BLOCK_I
        if EVEN_I:
            x_mask = is_row
            weight_mask = in_out
        elif WEIGHT_FIRST:
            x_mask = is_row & (first + i_I < num_in)[:, None]
            weight_mask = in_out & (first + i_I < num_in)[None, :]
        else:
            x_mask = is_row & (first + i_I < num_in)[None, :]
            weight_mask = in_out & (first + i_I < num_in)[:, None]
        x = tl.load(x_at + first, mask=x_mask, other=0.0)
        if EVEN_I and EVEN_O:
            weight = tl.load(weight_at + first)
        else:
            weight = tl.load(weight_at + first, mask=weight_mask, other=0.0)
        acc = _tile_product(x, weight, acc, WEIGHT_FIRST)
        if GATE > 0:
            if EVEN_I and EVEN_O:
                weight = tl.load(up_at + first)
            else:
                weight = tl.load(up_at + first, mask=weight_mask, other=0.0)
            up = _tile_product(x, weight, up, WEIGHT_FIRST)

    dtype = out_STO.dtype.element_ty
    if GATE > 0:
        acc = gated_sums(acc, up, dtype, GATE == 1)
    if WEIGHT_FIRST:
        to = t_T.to(tl.int64)[None, :] * num_out + o_O[:, None]
    else:
        to = t_T.to(tl.int64)[:, None] * num_out + o_O[None, :]
    to += split.to(tl.int64) * num_rows * num_out
    tl.store(out_STO + to, acc.to(dtype), mask=in_out & is_row)
