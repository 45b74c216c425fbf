"""Linear layers of many rows and one leaf in exact numerics: large tiles that the tensor memory accelerator fetches.

The order of every sum is that of `gemray_kernels.triton.exact_linear`. Two programs may share a multiprocessor, so that
numbers of tiles that suit `gemray_kernels.triton.exact_pipeline` badly suit these.

Shape legend: T rows, I inputs, O outputs.
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
    """What one program holds."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def fits(x_TI: Tensor, weight_OI: Tensor, tile: GemmTile) -> bool:
    """Whether the inputs are cut into whole tiles, and the memory accelerator can address both tensors."""
    aligned = all(m.stride(0) % 8 == 0 and m.data_ptr() % 16 == 0 for m in (x_TI, weight_OI))
    return x_TI.dtype == torch.bfloat16 and x_TI.shape[1] % tile.inputs == 0 and aligned


def gemm(x_TI: Tensor, weight_OI: Tensor, tile: GemmTile, out_dtype: torch.dtype) -> Tensor:
    """``x · weightᵀ`` [T, O].

    Args:
        x_TI: at least one row, as `fits` says.
        weight_OI: of the same dtype.
        tile: as `fits` says.
        out_dtype: of the result, which is rounded once.
    """
    num_rows, num_in = x_TI.shape
    num_out = weight_OI.shape[0]
    out_TO = torch.empty(num_rows, num_out, dtype=out_dtype, device=x_TI.device)
    early = starts_early(x_TI)
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.outputs)
    _gemm_kernel[(tiles,)](
        TensorDescriptor.from_tensor(x_TI, [tile.rows, tile.inputs]),
        TensorDescriptor.from_tensor(weight_OI, [tile.outputs, tile.inputs]),
        out_TO,
        num_rows,
        num_out,
        num_in,
        BLOCK_T=tile.rows,
        BLOCK_O=tile.outputs,
        BLOCK_I=tile.inputs,
        GROUP=GROUP,
        EARLY=early,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=early,
    )
    return out_TO


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _gemm_kernel(  # type: ignore[no-untyped-def]
    x_TI,
    weight_OI,
    out_TO,
    num_rows,
    num_out,
    num_in,
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
    wait_for_inputs(EARLY)
    acc = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for i in range(0, num_in, BLOCK_I):
        acc = dot(x_TI.load([t, i]), weight_OI.load([o, i]).T, acc)
    t_T = t + tl.arange(0, BLOCK_T)
    o_O = o + tl.arange(0, BLOCK_O)
    to = t_T.to(tl.int64)[:, None] * num_out + o_O[None, :]
    tl.store(out_TO + to, acc.to(out_TO.dtype.element_ty), mask=(t_T < num_rows)[:, None] & (o_O < num_out)[None, :])
