"""Routed experts for the rows of a prompt: no program without work, and tiles that use what they read often.

Experts get different numbers of rows, which only the device knows. So the programs of a product are numbered over the
blocks of all experts' pairs, one expert behind the other, and each finds its own block from the experts' counts; beside
the blocks at most one program an expert and column of outputs has nothing to do.

A program reads weights of gate and up as one tile of twice as many outputs, so that rows are read once for both.

Shape legend: T rows, H hidden size, E experts, K experts a row, R = T K (row, expert) pairs, I expert width, M pairs of
one program, N outputs of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.triton.activation import gated_sums
from gemray_kernels.triton.dot import dot
from gemray_kernels.triton.early_start import load_older
from gemray_kernels.triton.expert_tile import ExpertTile


def expert_outputs(
    x_TH: Tensor,
    pairs_ET: Tensor,
    counts_E: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    top_k: int,
    tiles: tuple[ExpertTile, ExpertTile] | None = None,
) -> Tensor:
    """Outputs [T, K, H] of each row's experts, as `gemray_kernels.reference.routing.expert_outputs` has them.

    Args:
        x_TH: the experts' input, contiguous within a row.
        pairs_ET: int32, the pairs ``t K + k`` of each expert in order.
        counts_E: int32, how many they are.
        gate_up_E2IH: gate halves above up halves.
        down_EHI: the second layer.
        top_k: experts of a row.
        tiles: of the two products; chosen by dtype and rows when None.
    """
    num_rows = x_TH.shape[0]
    num_experts, hidden_size, width = down_EHI.shape
    outputs_TKH = torch.empty(num_rows, top_k, hidden_size, dtype=x_TH.dtype, device=x_TH.device)
    if num_rows == 0:
        return outputs_TKH
    gate_up, down = tiles or tiles_for(x_TH.dtype, num_rows)
    gated_RI = gated(x_TH, pairs_ET, counts_E, gate_up_E2IH, top_k, gate_up)
    _down_kernel[num_programs(num_rows * top_k, num_experts, hidden_size, down)](
        gated_RI,
        down_EHI,
        pairs_ET,
        counts_E,
        outputs_TKH,
        num_rows,
        num_experts,
        width,
        hidden_size,
        BLOCK_M=down.pairs,
        LEAST_M=least_pairs(down),
        BLOCK_N=down.outputs,
        BLOCK_K=down.inputs,
        BLOCK_E=triton.next_power_of_2(num_experts),
        EVEN=width % down.inputs == 0,
        num_warps=down.num_warps,
        num_stages=down.num_stages,
    )
    return outputs_TKH


def num_programs(num_pairs: int, num_experts: int, num_out: int, tile: ExpertTile) -> tuple[int]:
    """The grid of a product whose programs find their pairs by `block_of`."""
    return ((triton.cdiv(num_pairs, tile.pairs) + num_experts) * triton.cdiv(num_out, tile.outputs),)


def gated(
    x_TH: Tensor,
    pairs_ET: Tensor,
    counts_E: Tensor,
    gate_up_E2IH: Tensor,
    top_k: int,
    tile: ExpertTile | None = None,
) -> Tensor:
    """``gelu_tanh(gate(x)) · up(x)`` [R, I] of each row's experts, each sum in one order whatever the tile.

    Args:
        x_TH: as `expert_outputs` takes it, like the tensors that follow.
        pairs_ET: of each expert.
        counts_E: of each expert.
        gate_up_E2IH: of each expert.
        top_k: experts of a row.
        tile: chosen by dtype and rows when None.
    """
    num_rows = x_TH.shape[0]
    num_experts, twice_width, hidden_size = gate_up_E2IH.shape
    width = twice_width // 2
    gate_up = tile or tiles_for(x_TH.dtype, num_rows)[0]
    gated_RI = torch.empty(num_rows * top_k, width, dtype=x_TH.dtype, device=x_TH.device)
    _gate_up_kernel[num_programs(num_rows * top_k, num_experts, width, gate_up)](
        x_TH,
        gate_up_E2IH,
        pairs_ET,
        counts_E,
        gated_RI,
        num_rows,
        num_experts,
        hidden_size,
        width,
        x_TH.stride(0),
        TOP_K=top_k,
        BLOCK_M=gate_up.pairs,
        LEAST_M=least_pairs(gate_up),
        BLOCK_N=gate_up.outputs,
        BLOCK_K=gate_up.inputs,
        BLOCK_E=triton.next_power_of_2(num_experts),
        EVEN=hidden_size % gate_up.inputs == 0,
        num_warps=gate_up.num_warps,
        num_stages=gate_up.num_stages,
    )
    return gated_RI


def tiles_for(dtype: torch.dtype, num_rows: int) -> tuple[ExpertTile, ExpertTile]:
    """The tiles of the two products: larger ones read less, smaller ones leave less of them empty behind an expert's
    last pair."""
    if dtype == torch.float32:
        tile = ExpertTile(pairs=16, outputs=32, inputs=32, num_warps=4, num_stages=2)
        return tile, tile
    if num_rows <= MEDIUM_ROWS:
        return (
            ExpertTile(pairs=64, outputs=64, inputs=64, num_warps=4, num_stages=4),
            ExpertTile(pairs=64, outputs=128, inputs=64, num_warps=4, num_stages=4),
        )
    return (
        ExpertTile(pairs=128, outputs=128, inputs=64, num_warps=8, num_stages=4),
        ExpertTile(pairs=128, outputs=256, inputs=64, num_warps=8, num_stages=4),
    )


MEDIUM_ROWS = 1536
"""Rows of a step up to which an expert of 128, eight a row, has fewer pairs than a large tile's."""


def least_pairs(tile: ExpertTile) -> int:
    """Pairs that are computed for an expert's last block: half of a large tile's, where they suffice."""
    return tile.pairs // 2 if tile.pairs >= 128 else tile.pairs


@triton.jit  # type: ignore[untyped-decorator]
def block_of(  # type: ignore[no-untyped-def]
    block, counts_E, num_experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr
):
    """(expert, first pair, number of pairs of the expert) of a block; no pairs behind the last block."""
    e_E = tl.arange(0, BLOCK_E)
    count_E = load_older(counts_E + e_E, mask=e_E < num_experts, other=0)
    blocks_E = (count_E + BLOCK_M - 1) // BLOCK_M
    ends_E = tl.cumsum(blocks_E, axis=0)
    expert = tl.sum((ends_E <= block).to(tl.int32), axis=0)
    mine_E = e_E == expert
    first_block = tl.sum(tl.where(mine_E, ends_E - blocks_E, 0), axis=0)
    return expert, (block - first_block) * BLOCK_M, tl.sum(tl.where(mine_E, count_E, 0), axis=0)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_TH,
    gate_up_E2IH,
    pairs_ET,
    counts_E,
    gated_RI,
    num_rows,
    num_experts,
    num_in,
    width,
    x_stride,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LEAST_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EVEN: tl.constexpr,
):
    columns = tl.cdiv(width, BLOCK_N)
    block = tl.program_id(0) // columns
    expert, first_pair, count = block_of(block, counts_E, num_experts, BLOCK_M, BLOCK_E)
    if first_pair >= count:
        return
    first_out = (tl.program_id(0) % columns) * BLOCK_N
    pairs = pairs_ET + expert.to(tl.int64) * num_rows
    weight = gate_up_E2IH + expert.to(tl.int64) * 2 * width * num_in
    if LEAST_M < BLOCK_M and count - first_pair <= LEAST_M:
        _gate_up_tile(
            x_TH, weight, pairs, gated_RI, first_pair, count, first_out, num_in, width, x_stride,
            TOP_K, LEAST_M, BLOCK_N, BLOCK_K, EVEN,
        )  # fmt: skip
    else:
        _gate_up_tile(
            x_TH, weight, pairs, gated_RI, first_pair, count, first_out, num_in, width, x_stride,
            TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _gate_up_tile(  # type: ignore[no-untyped-def]
    x_TH,
    weight_2IH,
    pairs_R,
    gated_RI,
    first_pair,
    count,
    first_out,
    num_in,
    width,
    x_stride,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One expert's gated numbers for a block of its pairs and of outputs."""
    m_M = first_pair + tl.arange(0, BLOCK_M)
    is_pair_M = m_M < count
    # What lies behind the last pair or output is computed from the first one, and not stored: loads need no mask.
    pair_M = tl.load(pairs_R + tl.where(is_pair_M, m_M, first_pair))
    x_at_M = x_TH + (pair_M // TOP_K).to(tl.int64) * x_stride
    n_2N = tl.arange(0, 2 * BLOCK_N)
    out_2N = tl.minimum(first_out + n_2N % BLOCK_N, width - 1) + n_2N // BLOCK_N * width
    weight_at_2N = weight_2IH + out_2N.to(tl.int64) * num_in
    k_K = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
    for first in range(0, num_in, BLOCK_K):
        in_K = first + k_K < num_in
        x_at = x_at_M[:, None] + (first + k_K)[None, :]
        weight_at = weight_at_2N[None, :] + (first + k_K)[:, None]
        if EVEN:
            x_MK = tl.load(x_at)
            weight = tl.load(weight_at)
        else:
            x_MK = tl.load(x_at, mask=in_K[None, :], other=0.0)
            weight = tl.load(weight_at, mask=in_K[:, None], other=0.0)
        acc = dot(x_MK, weight, acc)
    dtype = gated_RI.dtype.element_ty
    gate_MN, up_MN = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_N]), [0, 2, 1]))
    gated_MN = gated_sums(gate_MN, up_MN, dtype, True).to(dtype)
    n_N = first_out + tl.arange(0, BLOCK_N)
    to_MN = (pair_M.to(tl.int64) * width)[:, None] + n_N[None, :]
    tl.store(gated_RI + to_MN, gated_MN, mask=is_pair_M[:, None] & (n_N < width)[None, :])


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _down_kernel(  # type: ignore[no-untyped-def]
    gated_RI,
    down_EHI,
    pairs_ET,
    counts_E,
    out_RH,
    num_rows,
    num_experts,
    num_in,
    num_out,
    BLOCK_M: tl.constexpr,
    LEAST_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EVEN: tl.constexpr,
):
    columns = tl.cdiv(num_out, BLOCK_N)
    block = tl.program_id(0) // columns
    expert, first_pair, count = block_of(block, counts_E, num_experts, BLOCK_M, BLOCK_E)
    if first_pair >= count:
        return
    first_out = (tl.program_id(0) % columns) * BLOCK_N
    pairs = pairs_ET + expert.to(tl.int64) * num_rows
    weight = down_EHI + expert.to(tl.int64) * num_out * num_in
    if LEAST_M < BLOCK_M and count - first_pair <= LEAST_M:
        _down_tile(
            gated_RI, weight, pairs, out_RH, first_pair, count, first_out, num_in, num_out,
            LEAST_M, BLOCK_N, BLOCK_K, EVEN,
        )  # fmt: skip
    else:
        _down_tile(
            gated_RI, weight, pairs, out_RH, first_pair, count, first_out, num_in, num_out,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _down_tile(  # type: ignore[no-untyped-def]
    gated_RI,
    weight_HI,
    pairs_R,
    out_RH,
    first_pair,
    count,
    first_out,
    num_in,
    num_out,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One expert's outputs for a block of its pairs and of outputs."""
    m_M = first_pair + tl.arange(0, BLOCK_M)
    is_pair_M = m_M < count
    pair_M = tl.load(pairs_R + tl.where(is_pair_M, m_M, first_pair)).to(tl.int64)
    n_N = first_out + tl.arange(0, BLOCK_N)
    weight_at_N = weight_HI + tl.minimum(n_N, num_out - 1).to(tl.int64) * num_in
    x_at_M = gated_RI + pair_M * num_in
    k_K = tl.arange(0, BLOCK_K)
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_in, BLOCK_K):
        in_K = first + k_K < num_in
        x_at = x_at_M[:, None] + (first + k_K)[None, :]
        weight_at = weight_at_N[None, :] + (first + k_K)[:, None]
        if EVEN:
            x_MK = tl.load(x_at)
            weight_KN = tl.load(weight_at)
        else:
            x_MK = tl.load(x_at, mask=in_K[None, :], other=0.0)
            weight_KN = tl.load(weight_at, mask=in_K[:, None], other=0.0)
        acc_MN = dot(x_MK, weight_KN, acc_MN)
    to_MN = (pair_M * num_out)[:, None] + n_N[None, :]
    tl.store(out_RH + to_MN, acc_MN.to(out_RH.dtype.element_ty), mask=is_pair_M[:, None] & (n_N < num_out)[None, :])
