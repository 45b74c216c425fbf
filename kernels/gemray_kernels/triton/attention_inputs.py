"""From a stacked query, key and value product to attention, in one kernel; rounds where the reference rounds.

Compiled without fused multiply-add: in bfloat16 the compiler would make one of a rounded product and its sum, and
leave a rounding out.

Shape legend: T rows, S summands, N query heads, K KV heads, D head dim, H = D / 2 rotating pairs, O outputs; pages are
[pages, page_size, K, D].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.fp8_kv import FP8, FP8_MAX, check_scales
from gemray_kernels.layout import require_contiguous, require_rows
from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs
from gemray_kernels.triton.parts import total
from gemray_kernels.triton.rotation import inverse_rms, load_halves, rotate

LARGEST = tl.constexpr(FP8_MAX)


def attention_inputs(
    summands_STO: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, num_heads: int, q_norm: Norm | None, write: KVWrite | None
) -> Tensor:
    """As `gemray_kernels.reference.attention_inputs.attention_inputs`."""
    num_rows, head_dim = summands_STO.shape[1], cos_T1D.shape[-1]
    q_TND = torch.empty(num_rows, num_heads, head_dim, dtype=cos_T1D.dtype, device=summands_STO.device)
    num_kv_heads = 0 if write is None else write.k_pages.shape[2]
    if num_rows == 0 or num_heads + num_kv_heads == 0:
        return q_TND
    if write is not None and write.k_pages.stride() != write.v_pages.stride():
        raise ValueError("K and V pages must be laid out alike")
    require_rows(summands=summands_STO)
    require_contiguous(cos=cos_T1D, sin=sin_T1D)
    if q_norm is not None:
        require_contiguous(q_weight=q_norm.weight_D)
    if write is not None:
        check_scales(write.k_pages, write.k_scale, write.v_scale)
        require_rows(k_pages=write.k_pages, v_pages=write.v_pages)
        require_contiguous(k_weight=write.k_norm.weight_D, kv_index=write.kv_index_T)
    norms = [norm for norm in (q_norm, None if write is None else write.k_norm) if norm is not None]
    has_v = summands_STO.shape[2] == (num_heads + 2 * num_kv_heads) * head_dim
    early = starts_early(summands_STO)
    is_fp8 = write is not None and write.k_pages.dtype == FP8
    fill = q_TND  # stands for tensors that this variant does not touch
    _attention_inputs_kernel[(num_rows, num_heads + num_kv_heads)](
        summands_STO,
        fill if q_norm is None else q_norm.weight_D,
        fill if write is None else write.k_norm.weight_D,
        cos_T1D,
        sin_T1D,
        q_TND,
        fill if write is None else write.k_pages,
        fill if write is None else write.v_pages,
        fill if write is None else write.kv_index_T,
        norms[0].eps,
        num_heads,
        num_kv_heads if has_v else 0,
        summands_STO.stride(0),
        summands_STO.stride(1),
        *((0, 0, 0) if write is None else write.k_pages.stride()[:3]),
        1.0 / write.k_scale if write is not None and is_fp8 else None,
        1.0 / write.v_scale if write is not None and is_fp8 else None,
        SUMMANDS=summands_STO.shape[0],
        WRITES=write is not None,
        NORMED_VALUES=write is not None and write.normed_values,
        ROUND_BEFORE_WEIGHT=norms[0].round_before_weight,
        PAGE_SIZE=1 if write is None else write.k_pages.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_H=triton.next_power_of_2(head_dim // 2),
        EARLY=early,
        num_warps=1,
        enable_fp_fusion=False,
        launch_pdl=early,
    )
    return q_TND


@triton.jit  # type: ignore[untyped-decorator]
def _total_halves(  # type: ignore[no-untyped-def]
    summands_D, summand_stride, d_H, inside_H, dtype, SUMMANDS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Both halves of one head's sum, rounded once."""
    first_H = total(summands_D + d_H, summand_stride, inside_H, 0.0, SUMMANDS)
    second_H = total(summands_D + HEAD_DIM // 2 + d_H, summand_stride, inside_H, 0.0, SUMMANDS)
    return first_H.to(dtype).to(tl.float32), second_H.to(dtype).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _normed(x_H, factor, weight_H, dtype, ROUND_BEFORE_WEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    x_H = x_H * factor
    if ROUND_BEFORE_WEIGHT:
        x_H = x_H.to(dtype).to(tl.float32)
    return (x_H * weight_H).to(dtype).to(tl.float32)


@triton.jit
def _kept(x_H, inverse_scale, dtype):  # type: ignore[no-untyped-def]
    """What a page keeps of numbers that `dtype` holds: they themselves, or 8-bit floats where there is a scale."""
    x_H = x_H.to(dtype)
    if inverse_scale is not None:
        scaled_H = x_H.to(tl.float32) * inverse_scale
        x_H = tl.clamp(scaled_H, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    return x_H


@triton.jit  # type: ignore[untyped-decorator]
def _attention_inputs_kernel(  # type: ignore[no-untyped-def]
    summands_STO,
    q_weight_D,
    k_weight_D,
    cos_TD,
    sin_TD,
    q_TND,
    k_pages,
    v_pages,
    kv_index_T,
    eps,
    num_heads,
    heads_from_k_to_v,
    summand_stride,
    row_stride,
    page_stride,
    token_stride,
    kv_head_stride,
    inverse_k_scale,
    inverse_v_scale,
    SUMMANDS: tl.constexpr,
    WRITES: tl.constexpr,
    NORMED_VALUES: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d_H = tl.arange(0, BLOCK_H)
    inside_H = d_H < HEAD_DIM // 2
    dtype = q_TND.dtype.element_ty
    wait_for_inputs(EARLY)
    at = summands_STO + row * row_stride + head * HEAD_DIM
    first_H, second_H = _total_halves(at, summand_stride, d_H, inside_H, dtype, SUMMANDS, HEAD_DIM)
    factor = inverse_rms(first_H, second_H, eps, HEAD_DIM)
    if head < num_heads:
        weight1_H, weight2_H = load_halves(q_weight_D, d_H, inside_H, HEAD_DIM)
        first_H = _normed(first_H, factor, weight1_H, dtype, ROUND_BEFORE_WEIGHT)
        second_H = _normed(second_H, factor, weight2_H, dtype, ROUND_BEFORE_WEIGHT)
        turned1_H, turned2_H = rotate(first_H, second_H, row, cos_TD, sin_TD, d_H, inside_H, dtype, HEAD_DIM)
        out_D = q_TND + (row * num_heads + head) * HEAD_DIM
        tl.store(out_D + d_H, turned1_H, mask=inside_H)
        tl.store(out_D + HEAD_DIM // 2 + d_H, turned2_H, mask=inside_H)
    elif WRITES:
        index = tl.load(kv_index_T + row).to(tl.int64)
        kv_head = head - num_heads
        to = (index // PAGE_SIZE) * page_stride + (index % PAGE_SIZE) * token_stride + kv_head * kv_head_stride
        value1_H = first_H
        value2_H = second_H
        value_factor = factor
        if heads_from_k_to_v > 0:
            at += heads_from_k_to_v * HEAD_DIM
            value1_H, value2_H = _total_halves(at, summand_stride, d_H, inside_H, dtype, SUMMANDS, HEAD_DIM)
            value_factor = inverse_rms(value1_H, value2_H, eps, HEAD_DIM)
        if NORMED_VALUES:
            value1_H = value1_H * value_factor
            value2_H = value2_H * value_factor
        tl.store(v_pages + to + d_H, _kept(value1_H, inverse_v_scale, dtype), mask=inside_H)
        tl.store(v_pages + to + HEAD_DIM // 2 + d_H, _kept(value2_H, inverse_v_scale, dtype), mask=inside_H)
        weight1_H, weight2_H = load_halves(k_weight_D, d_H, inside_H, HEAD_DIM)
        first_H = _normed(first_H, factor, weight1_H, dtype, ROUND_BEFORE_WEIGHT)
        second_H = _normed(second_H, factor, weight2_H, dtype, ROUND_BEFORE_WEIGHT)
        turned1_H, turned2_H = rotate(first_H, second_H, row, cos_TD, sin_TD, d_H, inside_H, dtype, HEAD_DIM)
        tl.store(k_pages + to + d_H, _kept(turned1_H, inverse_k_scale, dtype), mask=inside_H)
        tl.store(k_pages + to + HEAD_DIM // 2 + d_H, _kept(turned2_H, inverse_k_scale, dtype), mask=inside_H)
