"""From a router's product to each row's experts, one warp a row.

Shape legend: T rows, S summands, E experts, K experts a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.layout import require_contiguous, require_rows
from gemray_kernels.triton import parts
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs


def route(summands_STE: Tensor, scale_E: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """As `gemray_kernels.reference.routing.route`; logits decide, and equal ones go to the smaller number."""
    require_rows(summands=summands_STE)
    require_contiguous(scale=scale_E)
    num_summands, num_rows, num_experts = summands_STE.shape
    weights_TK = torch.empty(num_rows, top_k, dtype=summands_STE.dtype, device=summands_STE.device)
    experts_TK = torch.empty(num_rows, top_k, dtype=torch.int64, device=summands_STE.device)
    if num_rows:
        early = starts_early(summands_STE)
        _route_kernel[(num_rows,)](
            summands_STE,
            scale_E,
            weights_TK,
            experts_TK,
            num_experts,
            summands_STE.stride(0),
            summands_STE.stride(1),
            SUMMANDS=num_summands,
            TOP_K=top_k,
            BLOCK_E=triton.next_power_of_2(num_experts),
            EARLY=early,
            num_warps=1,
            launch_pdl=early,
        )
    return weights_TK, experts_TK


@triton.jit  # type: ignore[untyped-decorator]
def _route_kernel(  # type: ignore[no-untyped-def]
    summands_STE,
    scale_E,
    weights_TK,
    experts_TK,
    num_experts,
    summand_stride,
    row_stride,
    SUMMANDS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    e_E = tl.arange(0, BLOCK_E)
    inside = e_E < num_experts
    scale = tl.load(scale_E + e_E, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    logit_E = parts.total(summands_STE + row * row_stride + e_E, summand_stride, inside, float("-inf"), SUMMANDS)
    exp_E = tl.where(inside, tl.exp(logit_E - tl.max(logit_E, axis=0)), 0.0)
    # A NaN ranks first, as the reference sorts it: every row chooses K different experts, and its weights are NaN.
    key_E = tl.where(logit_E == logit_E, logit_E, float("inf"))  # noqa: PLR0124
    rank_E = tl.full([BLOCK_E], TOP_K, tl.int32)
    for k in tl.static_range(TOP_K):
        is_left_E = inside & (rank_E == TOP_K)
        largest = tl.max(tl.where(is_left_E, key_E, float("-inf")), axis=0)
        best = tl.min(tl.where(is_left_E & (key_E == largest), e_E, BLOCK_E), axis=0)
        rank_E = tl.where(e_E == best, k, rank_E)
    chosen_E = rank_E < TOP_K
    total = tl.sum(tl.where(chosen_E, exp_E, 0.0), axis=0)
    tl.store(weights_TK + row * TOP_K + rank_E, exp_E / total * scale, mask=chosen_E)
    tl.store(experts_TK + row * TOP_K + rank_E, e_E.to(tl.int64), mask=chosen_E)
