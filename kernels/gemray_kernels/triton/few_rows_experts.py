"""Routed experts for few rows: every program finds its expert's rows by itself, so that two kernels are enough.

A program belongs to one (row, expert) pair and some outputs. The first pair of each expert does the work of all of
that expert's pairs; the programs of the others return at once.

Shape legend: T rows, H hidden size, E experts, K experts a row, R = T K (row, expert) pairs, I expert width,
M pairs of one expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.triton.activation import gated_sums
from gemray_kernels.triton.dot import dot
from gemray_kernels.triton.early_start import load_older, starts_early, wait_for_inputs
from gemray_kernels.triton.expert_tile import ExpertTile

MOST_ROWS = 16
"""An expert has at most one pair a row, and a program holds 16 pairs."""


def expert_outputs(
    x_TH: Tensor,
    experts_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    tiles: tuple[ExpertTile, ExpertTile] | None = None,
) -> Tensor:
    """Outputs [T, K, H] of each row's experts, as `gemray_kernels.reference.routing.expert_outputs` has them.

    Args:
        x_TH: the experts' input, at most 16 rows.
        experts_TK: int64, K different ones a row.
        gate_up_E2IH: gate halves above up halves.
        down_EHI: the second layer.
        tiles: of the two products; chosen by dtype when None.
    """
    num_rows, top_k = experts_TK.shape
    _, hidden_size, width = down_EHI.shape
    gate_up, down = tiles or tiles_for(x_TH.dtype)
    gated_RI = gated(x_TH, experts_TK, gate_up_E2IH, gate_up)
    outputs_TKH = torch.empty(num_rows, top_k, hidden_size, dtype=x_TH.dtype, device=x_TH.device)
    if num_rows == 0:
        return outputs_TKH
    early = starts_early(x_TH)
    _down_kernel[(triton.cdiv(hidden_size, down.outputs), num_rows * top_k)](
        gated_RI,
        down_EHI,
        experts_TK,
        outputs_TKH,
        num_rows * top_k,
        width,
        hidden_size,
        BLOCK_R=block_of_pairs(num_rows * top_k),
        BLOCK_M=MOST_ROWS,
        BLOCK_N=down.outputs,
        BLOCK_K=down.inputs,
        EVEN=width % down.inputs == 0 and hidden_size % down.outputs == 0,
        EARLY=early,
        num_warps=down.num_warps,
        num_stages=down.num_stages,
        launch_pdl=early,
    )
    return outputs_TKH


def gated(x_TH: Tensor, experts_TK: Tensor, gate_up_E2IH: Tensor, tile: ExpertTile) -> Tensor:
    """``gelu_tanh(gate(x)) · up(x)`` [R, I] of each row's experts, one order of summation whatever the tile.

    Raises:
        ValueError: more than 16 rows.
    """
    num_rows, top_k = experts_TK.shape
    _, twice_width, hidden_size = gate_up_E2IH.shape
    width = twice_width // 2
    if num_rows > MOST_ROWS:
        raise ValueError(f"{num_rows} rows: at most {MOST_ROWS} are allowed")
    num_pairs = num_rows * top_k
    gated_RI = torch.empty(num_pairs, width, dtype=x_TH.dtype, device=x_TH.device)
    if num_rows == 0:
        return gated_RI
    early = starts_early(x_TH)
    _gate_up_kernel[(triton.cdiv(width, tile.outputs), num_pairs)](
        x_TH,
        gate_up_E2IH,
        experts_TK,
        gated_RI,
        num_pairs,
        hidden_size,
        width,
        x_TH.stride(0),
        TOP_K=top_k,
        BLOCK_R=block_of_pairs(num_pairs),
        BLOCK_M=MOST_ROWS,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        EVEN=hidden_size % tile.inputs == 0 and width % tile.outputs == 0,
        EARLY=early,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=early,
    )
    return gated_RI


def block_of_pairs(num_pairs: int) -> int:
    """How many pairs a program looks through for those of its expert."""
    return max(16, int(triton.next_power_of_2(num_pairs)))


def tiles_for(dtype: torch.dtype) -> tuple[ExpertTile, ExpertTile]:
    """Tiles of the product up and of the product down."""
    if dtype == torch.float32:
        small = ExpertTile(pairs=16, outputs=32, inputs=32, num_warps=4, num_stages=2)
        return small, small
    return (
        ExpertTile(pairs=16, outputs=32, inputs=256, num_warps=4, num_stages=3),
        ExpertTile(pairs=16, outputs=64, inputs=64, num_warps=4, num_stages=6),
    )


@triton.jit  # type: ignore[untyped-decorator]
def pairs_like(pair, experts_R, num_pairs, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of `pair`, the pairs that share it in order, how many they are, and whether `pair` is their first."""
    r_R = tl.arange(0, BLOCK_R)
    expert_R = load_older(experts_R + r_R, mask=r_R < num_pairs, other=-1)
    expert = load_older(experts_R + pair)
    shares_R = (expert_R == expert).to(tl.int32)
    place_R = tl.cumsum(shares_R, axis=0) - 1
    is_at_MR = (place_R[None, :] == tl.arange(0, BLOCK_M)[:, None]) & (shares_R[None, :] > 0)
    pair_M = tl.sum(tl.where(is_at_MR, r_R[None, :], 0), axis=1)
    first = tl.min(tl.where(shares_R > 0, r_R, BLOCK_R), axis=0)
    return expert, pair_M, tl.sum(shares_R, axis=0), first == pair


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_TH,
    gate_up_E2IH,
    experts_R,
    gated_RI,
    num_pairs,
    num_in,
    width,
    x_stride,
    TOP_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    expert, pair_M, count, is_first = pairs_like(tl.program_id(1), experts_R, num_pairs, BLOCK_R, BLOCK_M)
    if not is_first:
        return
    is_pair_M = tl.arange(0, BLOCK_M) < count
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_width_N = n_N < width
    k_K = tl.arange(0, BLOCK_K)
    x_at_M = (pair_M // TOP_K).to(tl.int64) * x_stride
    gate_at_N = (expert.to(tl.int64) * 2 * width + n_N) * num_in
    up_at_N = gate_at_N + width.to(tl.int64) * num_in
    gate_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_in, BLOCK_K):
        in_K = first + k_K < num_in
        x_mask = is_pair_M[:, None]
        if not EVEN:
            x_mask = x_mask & in_K[None, :]
        x_MK = tl.load(x_TH + x_at_M[:, None] + (first + k_K)[None, :], mask=x_mask, other=0.0)
        gate_at = gate_up_E2IH + gate_at_N[None, :] + (first + k_K)[:, None]
        up_at = gate_up_E2IH + up_at_N[None, :] + (first + k_K)[:, None]
        if EVEN:
            gate_KN = tl.load(gate_at)
            up_KN = tl.load(up_at)
        else:
            gate_KN = tl.load(gate_at, mask=in_K[:, None] & in_width_N[None, :], other=0.0)
            up_KN = tl.load(up_at, mask=in_K[:, None] & in_width_N[None, :], other=0.0)
        gate_MN = dot(x_MK, gate_KN, gate_MN)
        up_MN = dot(x_MK, up_KN, up_MN)
    dtype = gated_RI.dtype.element_ty
    gated_MN = gated_sums(gate_MN, up_MN, dtype, True).to(dtype)
    to_M = pair_M.to(tl.int64) * width
    tl.store(gated_RI + to_M[:, None] + n_N[None, :], gated_MN, mask=is_pair_M[:, None] & in_width_N[None, :])


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]
def _down_kernel(  # type: ignore[no-untyped-def]
    gated_RI,
    down_EHI,
    experts_R,
    out_RH,
    num_pairs,
    num_in,
    num_out,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    # The experts were chosen before the kernel before this one: they may be read before it has ended.
    expert, pair_M, count, is_first = pairs_like(tl.program_id(1), experts_R, num_pairs, BLOCK_R, BLOCK_M)
    wait_for_inputs(EARLY)
    if not is_first:
        return
    is_pair_M = tl.arange(0, BLOCK_M) < count
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_out_N = n_N < num_out
    k_K = tl.arange(0, BLOCK_K)
    weight_at_N = (expert.to(tl.int64) * num_out + n_N) * num_in
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    x_at_M = pair_M.to(tl.int64) * num_in
    for first in range(0, num_in, BLOCK_K):
        in_K = first + k_K < num_in
        x_mask = is_pair_M[:, None]
        if not EVEN:
            x_mask = x_mask & in_K[None, :]
        x_MK = tl.load(gated_RI + x_at_M[:, None] + (first + k_K)[None, :], mask=x_mask, other=0.0)
        weight_at = down_EHI + weight_at_N[None, :] + (first + k_K)[:, None]
        if EVEN:
            weight_KN = tl.load(weight_at)
        else:
            weight_KN = tl.load(weight_at, mask=in_K[:, None] & in_out_N[None, :], other=0.0)
        acc_MN = dot(x_MK, weight_KN, acc_MN)
    to_MN = (pair_M.to(tl.int64) * num_out)[:, None] + n_N[None, :]
    tl.store(out_RH + to_MN, acc_MN.to(out_RH.dtype.element_ty), mask=is_pair_M[:, None] & in_out_N[None, :])
