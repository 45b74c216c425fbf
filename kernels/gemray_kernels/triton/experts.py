"""Routed experts in Triton: no sort, no host sync, and only the weights of experts that some row chose are read.

One kernel lists each expert's pairs, then a grouped product with the gated activation, a grouped product back, and a
weighted sum. Grids are sized by the number of rows alone; programs without rows return at once.

Shape legend: T rows, H hidden size, E experts, K experts a row, R = T K (row, expert) pairs, I expert width,
M pairs of one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.layout import require_contiguous, require_rows
from gemray_kernels.triton import few_rows_experts, many_rows_experts
from gemray_kernels.triton.activation import gated_sums
from gemray_kernels.triton.dot import dot
from gemray_kernels.triton.expert_tile import ExpertTile

MANY_ROWS = 256
"""Beyond, weights are read for many rows, and a grid of all rows for each expert would be mostly empty."""


def gated_experts(
    x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_E2IH: Tensor, down_EHI: Tensor
) -> Tensor:
    """As `gemray_kernels.reference.experts.gated_experts`."""
    require_rows(x=x_TH)
    require_contiguous(weights=weights_TK, experts=experts_TK, gate_up=gate_up_E2IH, down=down_EHI)
    return weighted_sum(expert_outputs(x_TH, experts_TK, gate_up_E2IH, down_EHI), weights_TK)


def weighted_sum(outputs_TKH: Tensor, weights_TK: Tensor) -> Tensor:
    """As `gemray_kernels.reference.experts.weighted_sum`, in the outputs' dtype."""
    num_rows, top_k, hidden_size = outputs_TKH.shape
    out_TH = torch.empty(num_rows, hidden_size, dtype=outputs_TKH.dtype, device=outputs_TKH.device)
    if num_rows:
        _weighted_sum_kernel[(num_rows, triton.cdiv(hidden_size, 1024))](
            outputs_TKH, weights_TK, out_TH, hidden_size, TOP_K=top_k, BLOCK=1024, num_warps=4
        )
    return out_TH


def pairs_of_experts(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The (row, expert) pairs [E, T] of each expert in order, and how many they are [E]; at most one a row."""
    num_rows, top_k = experts_TK.shape
    num_pairs = num_rows * top_k
    pairs_ET = torch.empty(num_experts, num_rows, dtype=torch.int32, device=experts_TK.device)
    counts_E = torch.empty(num_experts, dtype=torch.int32, device=experts_TK.device)
    # Few classes of blocks: a row count that no graph has is then no new program.
    block = max(16, triton.next_power_of_2(num_pairs)) if num_pairs <= 1024 else 4096
    _list_pairs_kernel[(num_experts,)](
        experts_TK, pairs_ET, counts_E, num_pairs, num_rows, BLOCK=block, num_warps=8 if block > 1024 else 4
    )
    return pairs_ET, counts_E


def expert_outputs(x_TH: Tensor, experts_TK: Tensor, gate_up_E2IH: Tensor, down_EHI: Tensor) -> Tensor:
    """As `gemray_kernels.reference.routing.expert_outputs`."""
    if experts_TK.shape[0] <= few_rows_experts.MOST_ROWS:
        return few_rows_experts.expert_outputs(x_TH, experts_TK, gate_up_E2IH, down_EHI)
    num_rows, top_k = experts_TK.shape
    num_experts, hidden_size, width = down_EHI.shape
    pairs_ET, counts_E = pairs_of_experts(experts_TK, num_experts)
    if num_rows > MANY_ROWS:
        return many_rows_experts.expert_outputs(x_TH, pairs_ET, counts_E, gate_up_E2IH, down_EHI, top_k)
    gated_RI = gated(x_TH, pairs_ET, counts_E, gate_up_E2IH, top_k)
    outputs_TKH = torch.empty(num_rows, top_k, hidden_size, dtype=x_TH.dtype, device=x_TH.device)
    tile = down_tile(x_TH.dtype, num_rows)
    _down_kernel[(triton.cdiv(num_rows, tile.pairs), triton.cdiv(hidden_size, tile.outputs), num_experts)](
        gated_RI,
        down_EHI,
        pairs_ET,
        counts_E,
        outputs_TKH,
        num_rows,
        width,
        hidden_size,
        BLOCK_M=tile.pairs,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return outputs_TKH


def gated(x_TH: Tensor, pairs_ET: Tensor, counts_E: Tensor, gate_up_E2IH: Tensor, top_k: int) -> Tensor:
    """``gelu_tanh(gate(x)) · up(x)`` [R, I] of each row's experts, each sum in one order whatever the number of rows.

    Args:
        x_TH: the experts' input.
        pairs_ET: of `pairs_of_experts`.
        counts_E: of `pairs_of_experts`.
        gate_up_E2IH: gate halves above up halves.
        top_k: K.
    """
    num_rows = x_TH.shape[0]
    if num_rows > MANY_ROWS:
        return many_rows_experts.gated(x_TH, pairs_ET, counts_E, gate_up_E2IH, top_k)
    num_experts, twice_width, hidden_size = gate_up_E2IH.shape
    width = twice_width // 2
    gated_RI = torch.empty(num_rows * top_k, width, dtype=x_TH.dtype, device=x_TH.device)
    tile = gate_up_tile(x_TH.dtype, num_rows)
    _gate_up_kernel[(triton.cdiv(num_rows, tile.pairs), triton.cdiv(width, tile.outputs), num_experts)](
        x_TH,
        gate_up_E2IH,
        pairs_ET,
        counts_E,
        gated_RI,
        num_rows,
        hidden_size,
        width,
        x_TH.stride(0),
        TOP_K=top_k,
        BLOCK_M=tile.pairs,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return gated_RI


def gate_up_tile(dtype: torch.dtype, num_rows: int) -> ExpertTile:
    """Few rows: weights stream through many small programs; many rows: larger tiles use them more than once."""
    if dtype == torch.float32:
        return ExpertTile(pairs=16, outputs=32, inputs=32, num_warps=4, num_stages=2)
    if num_rows <= 256:
        return ExpertTile(pairs=16, outputs=32, inputs=128, num_warps=4, num_stages=4)
    return ExpertTile(pairs=64, outputs=64, inputs=64, num_warps=4, num_stages=3)


def down_tile(dtype: torch.dtype, num_rows: int) -> ExpertTile:
    """As `gate_up_tile`; the second layer has fewer inputs and more outputs."""
    if dtype == torch.float32:
        return ExpertTile(pairs=16, outputs=32, inputs=32, num_warps=4, num_stages=2)
    if num_rows <= 256:
        return ExpertTile(pairs=16, outputs=64, inputs=64, num_warps=4, num_stages=4)
    return ExpertTile(pairs=64, outputs=128, inputs=64, num_warps=4, num_stages=3)


@triton.jit(do_not_specialize=["num_pairs", "num_rows"])  # type: ignore[untyped-decorator]
def _list_pairs_kernel(  # type: ignore[no-untyped-def]
    experts_R, pairs_ET, counts_E, num_pairs, num_rows, BLOCK: tl.constexpr
):
    expert = tl.program_id(0)
    count = 0
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        is_mine = (tl.load(experts_R + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
        place = count + tl.cumsum(is_mine, axis=0) - 1
        tl.store(pairs_ET + expert * num_rows + place, pair, mask=is_mine > 0)
        count += tl.sum(is_mine, axis=0)
    tl.store(counts_E + expert, count)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_TH,
    gate_up_E2IH,
    pairs_ET,
    counts_E,
    gated_RI,
    num_rows,
    num_in,
    width,
    x_stride,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert = tl.program_id(2)
    count = tl.load(counts_E + expert)
    m_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(0) * BLOCK_M >= count:
        return
    is_pair_M = m_M < count
    pair_M = tl.load(pairs_ET + expert * num_rows + m_M, mask=is_pair_M, other=0)
    n_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_width_N = n_N < width
    k_K = tl.arange(0, BLOCK_K)
    x_at_M = (pair_M // TOP_K).to(tl.int64) * x_stride
    gate_at_N = (expert.to(tl.int64) * 2 * width + n_N) * num_in
    up_at_N = gate_at_N + width.to(tl.int64) * num_in
    gate_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_in, BLOCK_K):
        in_K = first + k_K < num_in
        x_MK = tl.load(
            x_TH + x_at_M[:, None] + (first + k_K)[None, :], mask=is_pair_M[:, None] & in_K[None, :], other=0.0
        )
        weight_mask_KN = in_K[:, None] & in_width_N[None, :]
        gate_KN = tl.load(gate_up_E2IH + gate_at_N[None, :] + (first + k_K)[:, None], mask=weight_mask_KN, other=0.0)
        up_KN = tl.load(gate_up_E2IH + up_at_N[None, :] + (first + k_K)[:, None], mask=weight_mask_KN, other=0.0)
        gate_MN = dot(x_MK, gate_KN, gate_MN)
        up_MN = dot(x_MK, up_KN, up_MN)
    dtype = gated_RI.dtype.element_ty
    gated_MN = gated_sums(gate_MN, up_MN, dtype, True).to(dtype)
    to_M = pair_M.to(tl.int64) * width
    tl.store(gated_RI + to_M[:, None] + n_N[None, :], gated_MN, mask=is_pair_M[:, None] & in_width_N[None, :])


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _down_kernel(  # type: ignore[no-untyped-def]
    gated_RI,
    down_EHI,
    pairs_ET,
    counts_E,
    out_RH,
    num_rows,
    num_in,
    num_out,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert = tl.program_id(2)
    count = tl.load(counts_E + expert)
    m_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(0) * BLOCK_M >= count:
        return
    is_pair_M = m_M < count
    pair_M = tl.load(pairs_ET + expert * num_rows + m_M, mask=is_pair_M, other=0).to(tl.int64)
    n_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_out_N = n_N < num_out
    k_K = tl.arange(0, BLOCK_K)
    weight_at_N = (expert.to(tl.int64) * num_out + n_N) * num_in
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_in, BLOCK_K):
        in_K = first + k_K < num_in
        x_MK = tl.load(
            gated_RI + (pair_M * num_in)[:, None] + (first + k_K)[None, :],
            mask=is_pair_M[:, None] & in_K[None, :],
            other=0.0,
        )
        weight_KN = tl.load(
            down_EHI + weight_at_N[None, :] + (first + k_K)[:, None], mask=in_K[:, None] & in_out_N[None, :], other=0.0
        )
        acc_MN = dot(x_MK, weight_KN, acc_MN)
    to_MN = (pair_M * num_out)[:, None] + n_N[None, :]
    tl.store(out_RH + to_MN, acc_MN.to(out_RH.dtype.element_ty), mask=is_pair_M[:, None] & in_out_N[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _weighted_sum_kernel(  # type: ignore[no-untyped-def]
    outputs_RH, weights_TK, out_TH, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    sum_B = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(weights_TK + row * TOP_K + k).to(tl.float32)
        sum_B += weight * tl.load(outputs_RH + (row * TOP_K + k) * width + column, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out_TH + row * width + column, sum_B.to(out_TH.dtype.element_ty), mask=inside)
