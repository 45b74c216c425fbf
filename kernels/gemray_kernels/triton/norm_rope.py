"""Norm, rotation and the write to pages in one Triton kernel each, rounded as in `gemray_kernels.reference.norm_rope`.

Compiled without fused multiply-add: in bfloat16 the compiler would make one of a rounded product and its sum, and
leave a rounding out.

Shape legend: T rows, N query heads, K KV heads, D head dim, H = D / 2 rotating pairs; pages are
[pages, page_size, K, D].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.layout import require_contiguous, require_rows


def apply_rope(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """As `gemray_kernels.reference.rope.apply_rope`."""
    return _rotated(x_TND, None, cos_T1D, sin_T1D, 0.0)


def norm_rope(x_TND: Tensor, weight_D: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, eps: float) -> Tensor:
    """As `gemray_kernels.reference.norm_rope.norm_rope`."""
    return _rotated(x_TND, weight_D, cos_T1D, sin_T1D, eps)


def write_normed_kv(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k_weight_D: Tensor,
    cos_T1D: Tensor,
    sin_T1D: Tensor,
    eps: float,
    k_pages: Tensor,
    v_pages: Tensor,
    kv_index_T: Tensor,
) -> None:
    """As `gemray_kernels.reference.norm_rope.write_normed_kv`."""
    num_rows, num_heads, head_dim = k_TKD.shape
    if not num_rows:
        return
    if k_pages.stride() != v_pages.stride() or k_TKD.stride() != v_TKD.stride():
        raise ValueError("K and V, and their pages, must be laid out alike")
    require_rows(k=k_TKD, k_pages=k_pages)
    require_contiguous(k_weight=k_weight_D, cos=cos_T1D, sin=sin_T1D, kv_index=kv_index_T)
    _write_normed_kv_kernel[(num_rows, num_heads)](
        k_TKD,
        v_TKD,
        k_weight_D,
        cos_T1D,
        sin_T1D,
        k_pages,
        v_pages,
        kv_index_T,
        eps,
        k_TKD.stride(0),
        k_TKD.stride(1),
        k_pages.stride(0),
        k_pages.stride(1),
        k_pages.stride(2),
        PAGE_SIZE=k_pages.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_H=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
        enable_fp_fusion=False,
    )


def _rotated(x_TND: Tensor, weight_D: Tensor | None, cos_T1D: Tensor, sin_T1D: Tensor, eps: float) -> Tensor:
    require_rows(x=x_TND)
    require_contiguous(cos=cos_T1D, sin=sin_T1D)
    if weight_D is not None:
        require_contiguous(weight=weight_D)
    num_rows, num_heads, head_dim = x_TND.shape
    out_TND = torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device)
    if out_TND.numel():
        _norm_rope_kernel[(num_rows, num_heads)](
            x_TND,
            cos_T1D if weight_D is None else weight_D,
            cos_T1D,
            sin_T1D,
            out_TND,
            eps,
            x_TND.stride(0),
            x_TND.stride(1),
            num_heads,
            NORM=weight_D is not None,
            HEAD_DIM=head_dim,
            BLOCK_H=triton.next_power_of_2(head_dim // 2),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out_TND


@triton.jit  # type: ignore[untyped-decorator]
def load_halves(x_D, d_H, inside_H, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of one head, float32; dims m and m + D / 2 rotate together."""
    first_H = tl.load(x_D + d_H, mask=inside_H, other=0.0).to(tl.float32)
    second_H = tl.load(x_D + HEAD_DIM // 2 + d_H, mask=inside_H, other=0.0).to(tl.float32)
    return first_H, second_H


@triton.jit  # type: ignore[untyped-decorator]
def inverse_rms(first_H, second_H, eps, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 over the root of a head's mean square."""
    return 1.0 / tl.sqrt_rn(tl.sum(first_H * first_H + second_H * second_H, axis=0) / HEAD_DIM + eps)


@triton.jit  # type: ignore[untyped-decorator]
def rotate(first_H, second_H, row, cos_TD, sin_TD, d_H, inside_H, dtype, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each product and each sum is rounded to `dtype`, as separate operations round."""
    cos1_H, cos2_H = load_halves(cos_TD + row * HEAD_DIM, d_H, inside_H, HEAD_DIM)
    sin1_H, sin2_H = load_halves(sin_TD + row * HEAD_DIM, d_H, inside_H, HEAD_DIM)
    along1_H = (first_H * cos1_H).to(dtype).to(tl.float32)
    across1_H = (-second_H * sin1_H).to(dtype).to(tl.float32)
    along2_H = (second_H * cos2_H).to(dtype).to(tl.float32)
    across2_H = (first_H * sin2_H).to(dtype).to(tl.float32)
    return (along1_H + across1_H).to(dtype), (along2_H + across2_H).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_rope_kernel(  # type: ignore[no-untyped-def]
    x_TND,
    weight_D,
    cos_TD,
    sin_TD,
    out_TND,
    eps,
    row_stride,
    head_stride,
    num_heads,
    NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d_H = tl.arange(0, BLOCK_H)
    inside_H = d_H < HEAD_DIM // 2
    dtype = out_TND.dtype.element_ty
    first_H, second_H = load_halves(x_TND + row * row_stride + head * head_stride, d_H, inside_H, HEAD_DIM)
    if NORM:
        factor = inverse_rms(first_H, second_H, eps, HEAD_DIM)
        weight1_H, weight2_H = load_halves(weight_D, d_H, inside_H, HEAD_DIM)
        first_H = (first_H * factor * weight1_H).to(dtype).to(tl.float32)
        second_H = (second_H * factor * weight2_H).to(dtype).to(tl.float32)
    first_H, second_H = rotate(first_H, second_H, row, cos_TD, sin_TD, d_H, inside_H, dtype, HEAD_DIM)
    out_D = out_TND + (row * num_heads + head) * HEAD_DIM
    tl.store(out_D + d_H, first_H, mask=inside_H)
    tl.store(out_D + HEAD_DIM // 2 + d_H, second_H, mask=inside_H)


@triton.jit  # type: ignore[untyped-decorator]
def _write_normed_kv_kernel(  # type: ignore[no-untyped-def]
    k_TKD,
    v_TKD,
    k_weight_D,
    cos_TD,
    sin_TD,
    k_pages,
    v_pages,
    kv_index_T,
    eps,
    row_stride,
    head_stride,
    page_stride,
    token_stride,
    kv_head_stride,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d_H = tl.arange(0, BLOCK_H)
    inside_H = d_H < HEAD_DIM // 2
    dtype = k_pages.dtype.element_ty
    index = tl.load(kv_index_T + row).to(tl.int64)
    to = (index // PAGE_SIZE) * page_stride + (index % PAGE_SIZE) * token_stride + head * kv_head_stride
    at = row * row_stride + head * head_stride

    first_H, second_H = load_halves(v_TKD + at, d_H, inside_H, HEAD_DIM)
    factor = inverse_rms(first_H, second_H, eps, HEAD_DIM)
    tl.store(v_pages + to + d_H, (first_H * factor).to(dtype), mask=inside_H)
    tl.store(v_pages + to + HEAD_DIM // 2 + d_H, (second_H * factor).to(dtype), mask=inside_H)

    first_H, second_H = load_halves(k_TKD + at, d_H, inside_H, HEAD_DIM)
    factor = inverse_rms(first_H, second_H, eps, HEAD_DIM)
    weight1_H, weight2_H = load_halves(k_weight_D, d_H, inside_H, HEAD_DIM)
    first_H = (first_H * factor * weight1_H).to(dtype).to(tl.float32)
    second_H = (second_H * factor * weight2_H).to(dtype).to(tl.float32)
    first_H, second_H = rotate(first_H, second_H, row, cos_TD, sin_TD, d_H, inside_H, dtype, HEAD_DIM)
    tl.store(k_pages + to + d_H, first_H, mask=inside_H)
    tl.store(k_pages + to + HEAD_DIM // 2 + d_H, second_H, mask=inside_H)
