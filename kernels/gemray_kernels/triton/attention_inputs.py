"""From a stacked query, key and value product to attention, in one kernel; rounds where the reference rounds.

Compiled without fused multiply-add: in bfloat16 the compiler would make one of a rounded product and its sum, and
leave a rounding out.

Shape legend: T rows, S summands, N query heads, K KV heads, D head dim, H = D / 2 rotating pairs, O outputs, G heads of
a program; pages are [pages, page_size, K, D].
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
from gemray_kernels.triton.early_start import let_next_start, starts_early, wait_having_let
from gemray_kernels.triton.parts import total
from gemray_kernels.triton.rotation import inverse_rms, load_halves, rotate

FEW_ROWS = 64
"""More rows have programs of several heads: those of one head are too small to keep as many loads in flight."""
MANY_HEADS = 4
"""Heads of such a program, a warp each, so that a head's sums run in the same order in both."""
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
    heads = MANY_HEADS if num_rows > FEW_ROWS else 1
    _attention_inputs_kernel[(num_rows, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))](
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
        num_kv_heads,
        summands_STO.stride(0),
        summands_STO.stride(1),
        *((0, 0, 0) if write is None else write.k_pages.stride()[:3]),
        1.0 / write.k_scale if write is not None and is_fp8 else None,
        1.0 / write.v_scale if write is not None and is_fp8 else None,
        SUMMANDS=summands_STO.shape[0],
        WRITES=write is not None,
        HAS_V=has_v,
        HEADS=heads,
        NORMED_VALUES=write is not None and write.normed_values,
        ROUND_BEFORE_WEIGHT=norms[0].round_before_weight,
        PAGE_SIZE=1 if write is None else write.k_pages.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_H=triton.next_power_of_2(head_dim // 2),
        EARLY=early,
        num_warps=heads,
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
def _attention_inputs_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915
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
    num_kv_heads,
    summand_stride,
    row_stride,
    page_stride,
    token_stride,
    kv_head_stride,
    inverse_k_scale,
    inverse_v_scale,
    SUMMANDS: tl.constexpr,
    WRITES: tl.constexpr,
    HAS_V: tl.constexpr,
    HEADS: tl.constexpr,
    NORMED_VALUES: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)  # attention, which reads what is older than the last anchor before it waits
    row = tl.program_id(0).to(tl.int64)
    query_blocks = tl.cdiv(num_heads, HEADS)
    block = tl.program_id(1)
    g_G1 = tl.arange(0, HEADS)[:, None]
    # Each warp loads what heads share for itself: shared, it would go through shared memory, with all warps waiting.
    d_GH = tl.broadcast_to(tl.arange(0, BLOCK_H)[None, :], [HEADS, BLOCK_H])
    in_head = d_GH < HEAD_DIM // 2
    dtype = q_TND.dtype.element_ty
    # All loads come before the sums, whose steps wait for each other; the weights before the summands are there.
    if block < query_blocks:
        weight1, weight2 = load_halves(q_weight_D, d_GH, in_head, HEAD_DIM)
        wait_having_let(EARLY)
        head = block * HEADS + g_G1
        inside = in_head & (head < num_heads)
        at = summands_STO + row * row_stride + head * HEAD_DIM
        first, second = _total_halves(at, summand_stride, d_GH, inside, dtype, SUMMANDS, HEAD_DIM)
        cos1, cos2 = load_halves(cos_TD + row * HEAD_DIM, d_GH, in_head, HEAD_DIM)
        sin1, sin2 = load_halves(sin_TD + row * HEAD_DIM, d_GH, in_head, HEAD_DIM)
        factor = inverse_rms(first, second, eps, HEAD_DIM)
        first = _normed(first, factor, weight1, dtype, ROUND_BEFORE_WEIGHT)
        second = _normed(second, factor, weight2, dtype, ROUND_BEFORE_WEIGHT)
        turned1, turned2 = rotate(first, second, cos1, cos2, sin1, sin2, dtype)
        out = q_TND + (row * num_heads + head) * HEAD_DIM + d_GH
        tl.store(out, turned1, mask=inside)
        tl.store(out + HEAD_DIM // 2, turned2, mask=inside)
    elif WRITES:
        weight1, weight2 = load_halves(k_weight_D, d_GH, in_head, HEAD_DIM)
        wait_having_let(EARLY)
        kv_head = (block - query_blocks) * HEADS + g_G1
        inside = in_head & (kv_head < num_kv_heads)
        at = summands_STO + row * row_stride + (num_heads + kv_head) * HEAD_DIM
        first, second = _total_halves(at, summand_stride, d_GH, inside, dtype, SUMMANDS, HEAD_DIM)
        cos1, cos2 = load_halves(cos_TD + row * HEAD_DIM, d_GH, in_head, HEAD_DIM)
        sin1, sin2 = load_halves(sin_TD + row * HEAD_DIM, d_GH, in_head, HEAD_DIM)
        index = tl.load(kv_index_T + row).to(tl.int64)
        factor = inverse_rms(first, second, eps, HEAD_DIM)
        to = (index // PAGE_SIZE) * page_stride + (index % PAGE_SIZE) * token_stride + kv_head * kv_head_stride + d_GH
        value1 = first
        value2 = second
        value_factor = factor
        if HAS_V:
            at += num_kv_heads * HEAD_DIM
            value1, value2 = _total_halves(at, summand_stride, d_GH, inside, dtype, SUMMANDS, HEAD_DIM)
            value_factor = inverse_rms(value1, value2, eps, HEAD_DIM)
        if NORMED_VALUES:
            value1 = value1 * value_factor
            value2 = value2 * value_factor
        tl.store(v_pages + to, _kept(value1, inverse_v_scale, dtype), mask=inside)
        tl.store(v_pages + to + HEAD_DIM // 2, _kept(value2, inverse_v_scale, dtype), mask=inside)
        first = _normed(first, factor, weight1, dtype, ROUND_BEFORE_WEIGHT)
        second = _normed(second, factor, weight2, dtype, ROUND_BEFORE_WEIGHT)
        turned1, turned2 = rotate(first, second, cos1, cos2, sin1, sin2, dtype)
        tl.store(k_pages + to, _kept(turned1, inverse_k_scale, dtype), mask=inside)
        tl.store(k_pages + to + HEAD_DIM // 2, _kept(turned2, inverse_k_scale, dtype), mask=inside)
