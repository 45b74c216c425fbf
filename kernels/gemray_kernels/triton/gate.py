"""The gate of a per-layer embedding in one kernel.

Shape legend: T rows, O outputs, S summands.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.layout import require_rows
from gemray_kernels.triton.activation import gelu_tanh
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs
from gemray_kernels.triton.parts import total

BLOCK = 256


def gelu_of_total_and_mul(summands_STO: Tensor, factor_TO: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.gelu_of_total_and_mul`."""
    require_rows(summands=summands_STO, factor=factor_TO)
    num_summands, num_rows, width = summands_STO.shape
    out_TO = torch.empty(num_rows, width, dtype=factor_TO.dtype, device=factor_TO.device)
    if num_rows:
        early = starts_early(factor_TO)
        _gate_kernel[(num_rows, triton.cdiv(width, BLOCK))](
            summands_STO,
            factor_TO,
            out_TO,
            width,
            summands_STO.stride(0),
            summands_STO.stride(1),
            factor_TO.stride(0),
            SUMMANDS=num_summands,
            BLOCK=BLOCK,
            EARLY=early,
            num_warps=2,
            launch_pdl=early,
        )
    return out_TO


@triton.jit  # type: ignore[untyped-decorator]
def _gate_kernel(  # type: ignore[no-untyped-def]
    summands_STO,
    factor_TO,
    out_TO,
    width,
    summand_stride,
    row_stride,
    factor_stride,
    SUMMANDS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dtype = out_TO.dtype.element_ty
    sum_B = total(summands_STO + row * row_stride + column, summand_stride, inside, 0.0, SUMMANDS)
    gate_B = gelu_tanh(sum_B.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    factor_B = tl.load(factor_TO + row * factor_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_TO + row * width + column, (gate_B * factor_B).to(dtype), mask=inside)
