"""The second half of a per-layer embedding in one kernel: the gate, and the projection that reads it.

Every program applies the gate by itself: there are few inputs, and the time of a kernel is saved. The weight is loaded
before the kernel waits for its inputs.

Shape legend: S summands, T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.triton.activation import gelu_tanh
from gemray_kernels.triton.dot import dot
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs
from gemray_kernels.triton.gate import gelu_of_total_and_mul
from gemray_kernels.triton.linear_choice import summands
from gemray_kernels.triton.parts import total

MOST_ROWS = 64
MOST_INPUTS = 256
"""A program holds all inputs of its outputs."""


def gated_projection(summands_STI: Tensor, factor_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.gated_projection`."""
    num_summands, num_rows, num_in = summands_STI.shape
    if not 0 < num_rows <= MOST_ROWS or num_in > MOST_INPUTS:
        return summands(gelu_of_total_and_mul(summands_STI, factor_TI), weight_OI)
    if summands_STI.stride(2) != 1 or factor_TI.stride(1) != 1 or not weight_OI.is_contiguous():
        raise ValueError(
            f"summands of strides {summands_STI.stride()}, factor of {factor_TI.stride()}, weight of "
            f"{weight_OI.stride()}: contiguous rows and a contiguous weight are allowed"
        )
    num_out = weight_OI.shape[0]
    out_1TO = torch.empty(1, num_rows, num_out, dtype=weight_OI.dtype, device=weight_OI.device)
    early = starts_early(factor_TI)
    outputs = 64 if weight_OI.dtype == torch.bfloat16 else 16  # what registers hold
    _gated_projection_kernel[(triton.cdiv(num_out, outputs),)](
        summands_STI,
        factor_TI,
        weight_OI,
        out_1TO,
        num_rows,
        num_in,
        num_out,
        summands_STI.stride(0),
        summands_STI.stride(1),
        factor_TI.stride(0),
        SUMMANDS=num_summands,
        BLOCK_T=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_I=max(16, triton.next_power_of_2(num_in)),
        BLOCK_O=outputs,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    return out_1TO


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _gated_projection_kernel(  # type: ignore[no-untyped-def]
    summands_STI,
    factor_TI,
    weight_OI,
    out_TO,
    num_rows,
    num_in,
    num_out,
    summand_stride,
    row_stride,
    factor_stride,
    SUMMANDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    EARLY: tl.constexpr,
):
    i_I = tl.arange(0, BLOCK_I)
    t_T = tl.arange(0, BLOCK_T).to(tl.int64)
    o_O = tl.program_id(0).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    inside_OI = (o_O < num_out)[:, None] & (i_I < num_in)[None, :]
    weight_tile_OI = tl.load(weight_OI + o_O[:, None] * num_in + i_I[None, :], mask=inside_OI, other=0.0)
    wait_for_inputs(EARLY)
    inside_IT = (i_I < num_in)[:, None] & (t_T < num_rows)[None, :]
    dtype = out_TO.dtype.element_ty
    at_IT = summands_STI + t_T[None, :] * row_stride + i_I[:, None]
    sum_IT = total(at_IT, summand_stride, inside_IT, 0.0, SUMMANDS)
    gate_IT = gelu_tanh(sum_IT.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    factor_IT = tl.load(factor_TI + t_T[None, :] * factor_stride + i_I[:, None], mask=inside_IT, other=0.0)
    x_IT = (gate_IT * factor_IT.to(tl.float32)).to(dtype)
    acc_OT = dot(weight_tile_OI, x_IT, tl.zeros([BLOCK_O, BLOCK_T], tl.float32))
    to_OT = t_T[None, :] * num_out + o_O[:, None]
    tl.store(out_TO + to_OT, acc_OT.to(dtype), mask=(o_O < num_out)[:, None] & (t_T < num_rows)[None, :])
