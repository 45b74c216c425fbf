"""What lies between two products of a layer, in one kernel that rounds where `reference.layer_norms` rounds.

Shape legend: T rows, D width of the stream, S summands, K experts a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.layout import require_contiguous, require_rows
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.triton.early_start import let_next_start, starts_early, wait_for_inputs
from gemray_kernels.triton.parts import total
from gemray_kernels.triton.rms_norm import warps_for

MOST_NORMS = 3
MOST_AHEAD = tl.constexpr(4096)
"""Longest row whose scale is loaded with its weights: of longer ones the compiler then loads fewer parts at a time
(`benchmarks/results/2026-11-30-h200-norms`)."""


def add_then_norms(
    residual_TD: Tensor,
    summands_STD: Tensor,
    post_norm: Norm | None,
    scale: Tensor | None,
    norms: Sequence[Norm],
    *,
    lets_at_once: bool = False,
) -> tuple[Tensor, ...]:
    """As `gemray_kernels.reference.layer_norms.add_then_norms`."""
    parts = residual_TD, summands_STD, post_norm, scale, norms
    return _launch(*parts, None, None, None, None, lets_at_once=lets_at_once)


def add_experts_then_norms(
    residual_TD: Tensor,
    dense_STD: Tensor,
    dense_norm: Norm,
    routed_TKD: Tensor,
    weights_TK: Tensor,
    routed_norm: Norm,
    post_norm: Norm,
    scale: Tensor | None,
    norms: Sequence[Norm],
    *,
    lets_at_once: bool = False,
) -> tuple[Tensor, ...]:
    """As `gemray_kernels.reference.layer_norms.add_experts_then_norms`."""
    parts = residual_TD, dense_STD, post_norm, scale, norms
    return _launch(*parts, dense_norm, routed_TKD, weights_TK, routed_norm, lets_at_once=lets_at_once)


def _launch(
    residual_TD: Tensor,
    summands_STD: Tensor,
    post_norm: Norm | None,
    scale: Tensor | None,
    norms: Sequence[Norm],
    dense_norm: Norm | None,
    routed_TKD: Tensor | None,
    weights_TK: Tensor | None,
    routed_norm: Norm | None,
    *,
    lets_at_once: bool,
) -> tuple[Tensor, ...]:
    num_rows, width = residual_TD.shape
    if len(norms) > MOST_NORMS or (post_norm is not None and (post_norm.round_before_weight or post_norm.factor)):
        raise ValueError(f"{len(norms)} norms behind {post_norm}: at most 3 behind a norm without factor are allowed")
    outs = [torch.empty_like(residual_TD, memory_format=torch.contiguous_format) for _ in range(1 + len(norms))]
    if num_rows == 0:
        return tuple(outs)
    require_rows(residual=residual_TD, summands=summands_STD)
    for norm in (post_norm, dense_norm, routed_norm, *norms):
        if norm is not None:
            require_contiguous(weight=norm.weight_D)
    if weights_TK is not None and routed_TKD is not None:
        require_contiguous(weights=weights_TK, routed=routed_TKD)
    eps = next(norm.eps for norm in (post_norm, *norms) if norm is not None)
    fill = residual_TD  # stands for tensors that this variant does not read
    block = triton.next_power_of_2(width)
    early = starts_early(residual_TD)
    padded: list[Norm | None] = [*norms, *[None] * (MOST_NORMS - len(norms))]
    _add_then_norms_kernel[(num_rows,)](
        residual_TD,
        summands_STD,
        fill if post_norm is None else post_norm.weight_D,
        fill if scale is None else scale,
        fill if dense_norm is None else dense_norm.weight_D,
        fill if routed_TKD is None else routed_TKD,
        fill if weights_TK is None else weights_TK,
        fill if routed_norm is None else routed_norm.weight_D,
        *(fill if norm is None else norm.weight_D for norm in padded),
        *outs,
        *[fill] * (MOST_NORMS - len(norms)),
        eps,
        *(1.0 if norm is None or norm.factor is None else norm.factor for norm in padded),
        width,
        residual_TD.stride(0),
        summands_STD.stride(0),
        summands_STD.stride(1),
        SUMMANDS=summands_STD.shape[0],
        TOP_K=0 if weights_TK is None else weights_TK.shape[1],
        HAS_POST_NORM=post_norm is not None,
        HAS_SCALE=scale is not None,
        NUM_NORMS=len(norms),
        ROUND0=_rounding(padded[0]),
        ROUND1=_rounding(padded[1]),
        ROUND2=_rounding(padded[2]),
        BLOCK=block,
        EARLY=early,
        AT_ONCE=early and lets_at_once,
        num_warps=_warps(block),
        launch_pdl=early,
    )
    return tuple(outs)


def _warps(block: int) -> int:
    """Warps of a row: those of E2B's have half as many instructions with 8
    (`benchmarks/results/2026-11-30-h200-norms`)."""
    return 8 if block == 2048 else warps_for(block)


def _rounding(norm: Norm | None) -> int:
    """Roundings before the weight and before the factor, as bits 0 and 1."""
    if norm is None:
        return 0
    return int(norm.round_before_weight) + 2 * int(norm.factor is not None)


@triton.jit
def _inverse_rms(x_D, eps, width):  # type: ignore[no-untyped-def]
    return 1.0 / tl.sqrt_rn(tl.sum(x_D * x_D, axis=0) / width + eps)


@triton.jit  # type: ignore[untyped-decorator]
def _normed(x_D, inverse, weight_D, factor, dtype, ROUND: tl.constexpr):  # type: ignore[no-untyped-def]
    y_D = x_D * inverse
    if ROUND % 2 == 1:
        y_D = y_D.to(dtype).to(tl.float32)
    y_D = (y_D * weight_D.to(tl.float32)).to(dtype)
    if ROUND >= 2:
        y_D = (y_D.to(tl.float32) * factor).to(dtype)
    return y_D


@triton.jit  # type: ignore[untyped-decorator]
def _add_then_norms_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0912
    residual_TD,
    summands_STD,
    post_weight_D,
    scale_1,
    dense_weight_D,
    routed_TKD,
    weights_TK,
    routed_weight_D,
    weight0_D,
    weight1_D,
    weight2_D,
    out_TD,
    normed0_TD,
    normed1_TD,
    normed2_TD,
    eps,
    factor0,
    factor1,
    factor2,
    width,
    residual_stride,
    summand_stride,
    summand_row_stride,
    SUMMANDS: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_POST_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    NUM_NORMS: tl.constexpr,
    ROUND0: tl.constexpr,
    ROUND1: tl.constexpr,
    ROUND2: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d_D = tl.arange(0, BLOCK)
    inside = d_D < width
    dtype = out_TD.dtype.element_ty
    let_next_start(AT_ONCE)
    # Weights are asked for before the wait: a load behind a sum over the row would begin when the sum has ended.
    if HAS_POST_NORM:
        post_D = tl.load(post_weight_D + d_D, mask=inside, other=0.0)
    if HAS_SCALE and BLOCK <= MOST_AHEAD:
        scale = tl.load(scale_1)
    if NUM_NORMS > 0:
        first_D = tl.load(weight0_D + d_D, mask=inside, other=0.0)
    if NUM_NORMS > 1:
        second_D = tl.load(weight1_D + d_D, mask=inside, other=0.0)
    if NUM_NORMS > 2:
        third_D = tl.load(weight2_D + d_D, mask=inside, other=0.0)
    if TOP_K > 0:
        dense_D = tl.load(dense_weight_D + d_D, mask=inside, other=0.0)
        expert_D = tl.load(routed_weight_D + d_D, mask=inside, other=0.0)
    wait_for_inputs(EARLY)
    residual_D = tl.load(residual_TD + row * residual_stride + d_D, mask=inside, other=0.0).to(tl.float32)
    y_D = total(summands_STD + row * summand_row_stride + d_D, summand_stride, inside, 0.0, SUMMANDS)
    y_D = y_D.to(dtype).to(tl.float32)
    if TOP_K > 0:
        routed_D = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(TOP_K):
            weight = tl.load(weights_TK + row * TOP_K + k).to(tl.float32)
            routed_D += weight * tl.load(routed_TKD + (row * TOP_K + k) * width + d_D, mask=inside, other=0.0).to(
                tl.float32
            )
        routed_D = routed_D.to(dtype).to(tl.float32)
        y_D = _normed(y_D, _inverse_rms(y_D, eps, width), dense_D, 1.0, dtype, 0).to(tl.float32)
        routed_D = _normed(routed_D, _inverse_rms(routed_D, eps, width), expert_D, 1.0, dtype, 0).to(tl.float32)
        y_D = (y_D + routed_D).to(dtype).to(tl.float32)
    if HAS_POST_NORM:
        y_D = _normed(y_D, _inverse_rms(y_D, eps, width), post_D, 1.0, dtype, 0).to(tl.float32)
    x_D = (residual_D + y_D).to(dtype)
    if HAS_SCALE:
        if BLOCK > MOST_AHEAD:
            scale = tl.load(scale_1)
        x_D = (x_D.to(tl.float32) * scale.to(tl.float32)).to(dtype)
    tl.store(out_TD + row * width + d_D, x_D, mask=inside)
    if NUM_NORMS > 0:
        x_D = x_D.to(tl.float32)
        inverse = _inverse_rms(x_D, eps, width)
        y_D = _normed(x_D, inverse, first_D, factor0, dtype, ROUND0)
        tl.store(normed0_TD + row * width + d_D, y_D, mask=inside)
        if NUM_NORMS > 1:
            y_D = _normed(x_D, inverse, second_D, factor1, dtype, ROUND1)
            tl.store(normed1_TD + row * width + d_D, y_D, mask=inside)
        if NUM_NORMS > 2:
            y_D = _normed(x_D, inverse, third_D, factor2, dtype, ROUND2)
            tl.store(normed2_TD + row * width + d_D, y_D, mask=inside)
