"""Linear layers of many rows in exact numerics: large tiles of bfloat16 that the tensor memory accelerator fetches.

The order of every sum is that of `gemray_kernels.triton.exact_linear`.

Shape legend: T rows, I inputs, O outputs, S summands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gemray_kernels.triton.dot import dot
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs

GROUP = 8
"""Tiles of rows that run side by side over the same outputs, so that they find them in the cache."""


@dataclass(frozen=True)
class GemmTile:
    """What one program holds, and how many leaves it adds up: 1, 2 or 4."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    leaves: int = 1


def fits(x_TI: Tensor, weight_OI: Tensor, leaves: int, tile: GemmTile) -> bool:
    """Whether leaves are cut into whole tiles, and the accelerator can address both tensors."""
    aligned = all(m.stride(0) % 8 == 0 and m.data_ptr() % 16 == 0 for m in (x_TI, weight_OI))
    return x_TI.dtype == torch.bfloat16 and x_TI.shape[1] % (leaves * tile.inputs) == 0 and aligned


def gemm_summands(x_TI: Tensor, weight_OI: Tensor, leaves: int, tile: GemmTile, out_dtype: torch.dtype) -> Tensor:
    """Summands [S, T, O] of ``x · weightᵀ``, aligned subtrees of ``tile.leaves`` leaves in order.

    Args:
        x_TI: at least one row, as `fits` says.
        weight_OI: of the same dtype.
        leaves: into which the inputs are cut, a multiple of the tile's.
        tile: as `fits` says.
        out_dtype: of the summands; float32 unless there is only one.
    """
    num_rows, num_in = x_TI.shape
    num_out = weight_OI.shape[0]
    splits = leaves // tile.leaves
    out_STO = torch.empty(splits, num_rows, num_out, dtype=out_dtype, device=x_TI.device)
    early = starts_early(x_TI)
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.outputs)
    _gemm_kernel[(tiles, splits)](
        TensorDescriptor.from_tensor(x_TI, [tile.rows, tile.inputs]),
        TensorDescriptor.from_tensor(weight_OI, [tile.outputs, tile.inputs]),
        out_STO,
        num_rows,
        num_out,
        num_in // leaves // tile.inputs,
        LEAVES=tile.leaves,
        BLOCK_T=tile.rows,
        BLOCK_O=tile.outputs,
        BLOCK_I=tile.inputs,
        GROUP=GROUP,
        EARLY=early,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=early,
    )
    return out_STO


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _gemm_kernel(  # type: ignore[no-untyped-def]
    x_TI,
    weight_OI,
    out_STO,
    num_rows,
    num_out,
    leaf_blocks,
    LEAVES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):
    together = GROUP * tl.cdiv(num_out, BLOCK_O)
    first_tile = tl.program_id(0) // together * GROUP
    side_by_side = tl.minimum(tl.cdiv(num_rows, BLOCK_T) - first_tile, GROUP)
    t = (first_tile + tl.program_id(0) % together % side_by_side) * BLOCK_T
    o = tl.program_id(0) % together // side_by_side * BLOCK_O
    first = tl.program_id(1) * LEAVES * leaf_blocks * BLOCK_I
    wait_for_inputs(EARLY)
    # One loop over all leaves keeps the pipeline full; `leaf` and `pair` wait for their neighbours of the tree.
    acc = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    leaf = acc
    pair = acc
    for block in range(LEAVES * leaf_blocks):
        x = x_TI.load([t, first + block * BLOCK_I])
        weight = weight_OI.load([o, first + block * BLOCK_I])
        acc = dot(x, weight.T, acc)
        if LEAVES >= 2:  # noqa: SIM102 - chosen at compile time
            if (block == leaf_blocks - 1) | (block == 3 * leaf_blocks - 1):
                leaf = acc
                acc = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
        if LEAVES >= 4:  # noqa: SIM102 - chosen at compile time
            if block == 2 * leaf_blocks - 1:
                pair = leaf + acc
                acc = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    if LEAVES >= 2:
        acc = leaf + acc
    if LEAVES >= 4:
        acc = pair + acc
    t_T = t + tl.arange(0, BLOCK_T)
    o_O = o + tl.arange(0, BLOCK_O)
    at = out_STO + tl.program_id(1).to(tl.int64) * num_rows * num_out
    to = t_T.to(tl.int64)[:, None] * num_out + o_O[None, :]
    tl.store(at + to, acc.to(out_STO.dtype.element_ty), mask=(t_T < num_rows)[:, None] & (o_O < num_out)[None, :])
