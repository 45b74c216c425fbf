"""Norms, each in one Triton kernel that rounds where `gemray_kernels.reference.rms_norm` rounds.

Shape legend: T rows, N heads, D the axis that is normed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.layout import require_contiguous, require_rows


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As `gemray_kernels.reference.rms_norm.rms_norm`."""
    return _normed(x, weight, eps, round_before_weight=False)


def rms_norm_then_scale(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `gemray_kernels.reference.rms_norm.rms_norm_then_scale`."""
    return _normed(x, weight, eps, round_before_weight=True)


def warps_for(block: int) -> int:
    """Warps of a program that holds `block` elements: about 16 a thread."""
    return min(max(block // 512, 1), 16)


def _normed(x: Tensor, weight: Tensor | None, eps: float, *, round_before_weight: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    # Heads of a stacked projection lie apart: [T, N, D] with any stride of T.
    x_TND = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    require_rows(x=x_TND)
    if weight is not None:
        require_contiguous(weight=weight)
    num_heads, width = x_TND.shape[1], x_TND.shape[2]
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(x_TND.shape[0] * num_heads,)](
        x_TND,
        out if weight is None else weight,
        out,
        eps,
        width,
        num_heads,
        x_TND.stride(0),
        x_TND.stride(1),
        HAS_WEIGHT=weight is not None,
        ROUND_BEFORE_WEIGHT=round_before_weight,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_TND,
    weight_D,
    out,
    eps,
    width,
    num_heads,
    row_stride,
    head_stride,
    HAS_WEIGHT: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d_D = tl.arange(0, BLOCK)
    inside = d_D < width
    at = (row // num_heads) * row_stride + (row % num_heads) * head_stride
    x_D = tl.load(x_TND + at + d_D, mask=inside, other=0.0).to(tl.float32)
    y_D = x_D * (1.0 / tl.sqrt_rn(tl.sum(x_D * x_D, axis=0) / width + eps))
    dtype = out.dtype.element_ty
    if ROUND_BEFORE_WEIGHT:
        y_D = y_D.to(dtype).to(tl.float32)
    if HAS_WEIGHT:
        y_D = y_D * tl.load(weight_D + d_D, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + d_D, y_D.to(dtype), mask=inside)
