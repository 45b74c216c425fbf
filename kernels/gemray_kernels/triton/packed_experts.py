"""Routed experts on packed weights: no sort, no host sync, and only the words of experts that some row chose are read.

For few rows every program finds its expert's pairs by itself (`few_rows_experts`); for more a kernel lists them first
(`experts`). Numbers are made in registers (`packed_planes`).

Shape legend: T rows, H hidden size, E experts, K experts a row, R = T K (row, expert) pairs, I inputs of a product,
O outputs, M pairs of one program, B units, C words of a unit, R runs of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from gemray_kernels.packed_product import PackedExpertProducts
from gemray_kernels.packed_tiles import TiledWeight, laid_out
from gemray_kernels.packed_weight import PackedWeight
from gemray_kernels.reference.packed_linear import ReferenceExperts
from gemray_kernels.triton import few_rows_experts
from gemray_kernels.triton.activation import gated_sums
from gemray_kernels.triton.early_start import load_older, starts_early, wait_for_inputs
from gemray_kernels.triton.experts import pairs_of_experts, weighted_sum
from gemray_kernels.triton.few_rows_experts import pairs_like
from gemray_kernels.triton.packed_linear import CODES, add_unit, load_planes, load_tile


@dataclass(frozen=True)
class PackedExpertTile:
    """What one program of an expert's product holds."""

    pairs: int
    outputs: int
    num_warps: int
    num_stages: int


def packed_experts(gate_up: PackedWeight, down: PackedWeight) -> PackedExpertProducts:
    """Experts of these weights, which are laid out anew in their memory where both have a tiling."""
    if gate_up.tiling is None or down.tiling is None:
        return ReferenceExperts(gate_up, down)
    return TiledExperts(laid_out(gate_up, gate_up.tiling), laid_out(down, down.tiling))


class TiledExperts(PackedExpertProducts):
    """Experts whose weights are laid out in units; rows are bfloat16."""

    def __init__(self, gate_up: TiledWeight, down: TiledWeight) -> None:
        """Experts of weights with a leading dimension, gate halves above up halves."""
        self._gate_up = gate_up
        self._down = down

    @override
    def outputs(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        num_rows, top_k = experts_TK.shape
        num_experts = self._down.words_BOC.shape[0]
        few = num_rows <= few_rows_experts.MOST_ROWS
        pairs = None if few else pairs_of_experts(experts_TK, num_experts)
        gated_RI = packed_expert_linear(x_TH, self._gate_up, experts_TK, top_k, gated=True, pairs=pairs)
        outputs_RH = packed_expert_linear(gated_RI, self._down, experts_TK, 1, gated=False, pairs=pairs)
        return outputs_RH.view(num_rows, top_k, -1)

    @override
    def weighted_sum(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        return weighted_sum(self.outputs(x_TH, experts_TK), weights_TK)


def tile_for(num_rows: int, *, gated: bool) -> PackedExpertTile:
    """Few rows: words stream through many small programs; many rows: larger tiles use them more than once."""
    if num_rows <= 256:
        return PackedExpertTile(pairs=16, outputs=32 if gated else 64, num_warps=4, num_stages=4)
    return PackedExpertTile(pairs=64, outputs=64 if gated else 128, num_warps=4, num_stages=3)


def packed_expert_linear(
    x_XI: Tensor,
    weight: TiledWeight,
    experts_TK: Tensor,
    pairs_a_row: int,
    *,
    gated: bool,
    pairs: tuple[Tensor, Tensor] | None,
    tile: PackedExpertTile | None = None,
) -> Tensor:
    """Products [R, O] of all pairs with the weights of their experts.

    Args:
        x_XI: bfloat16 rows, one for `pairs_a_row` pairs in order.
        weight: of all experts.
        experts_TK: int64, K different ones a row.
        pairs_a_row: K where pairs share their row's input, 1 where each has its own.
        gated: whether the first half of the outputs gates the second by tanh-GELU.
        pairs: of each expert, with their counts; None, for at most 16 rows, where programs are to find them.
        tile: chosen by the number of rows when None.
    """
    num_rows, top_k = experts_TK.shape
    num_pairs, num_in = num_rows * top_k, weight.num_in
    num_out = weight.num_out // 2 if gated else weight.num_out
    out_RO = torch.empty(num_pairs, num_out, dtype=x_XI.dtype, device=x_XI.device)
    if num_rows == 0:
        return out_RO
    if x_XI.stride(1) != 1 or x_XI.shape[1] != num_in or not experts_TK.is_contiguous():
        raise ValueError(
            f"x {list(x_XI.shape)} with strides {x_XI.stride()} and experts with {experts_TK.stride()}: {num_in} "
            f"contiguous inputs and contiguous experts are allowed"
        )
    unit, scale_EBO = weight.unit, weight.scales_from(0)
    tile = tile or tile_for(num_rows, gated=gated)
    num_experts, units = weight.words_BOC.shape[:2]
    finds_pairs = pairs is None
    early = finds_pairs and starts_early(x_XI)
    outputs = triton.cdiv(num_out, tile.outputs)
    pairs_ET, counts_E = pairs or (experts_TK, experts_TK)
    grid = (outputs, num_pairs, 1) if finds_pairs else (outputs, triton.cdiv(num_rows, tile.pairs), num_experts)
    _packed_expert_kernel[grid](
        x_XI,
        weight.words_BOC,
        scale_EBO,
        weight.factor_O,
        experts_TK,
        pairs_ET,
        counts_E,
        out_RO,
        num_pairs,
        num_rows,
        num_in,
        num_out,
        weight.num_out,
        units,
        x_XI.stride(0),
        CODE=CODES[weight.code],
        SCALING=weight.scaling.value,
        WORDS=unit.words,
        PLANES=unit.planes,
        RUNS=weight.runs,
        GATED=gated,
        PAIRS_A_ROW=pairs_a_row,
        FINDS_PAIRS=finds_pairs,
        BLOCK_R=max(16, triton.next_power_of_2(num_pairs)) if finds_pairs else 16,
        BLOCK_M=tile.pairs,
        BLOCK_O=tile.outputs,
        EVEN_I=num_in % unit.inputs == 0,
        EVEN_O=num_out % tile.outputs == 0,
        WEIGHT_FIRST=tile.pairs > 32,
        EARLY=early,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=early,
    )
    return out_RO


@triton.jit(do_not_specialize=["num_pairs", "num_rows"])  # type: ignore[untyped-decorator]
def _packed_expert_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    x_XI,
    words_EBOC,
    scale_EBO,
    factor_EO,
    experts_R,
    pairs_ET,
    counts_E,
    out_RO,
    num_pairs,
    num_rows,
    num_in,
    num_out,
    all_out,
    units,
    x_stride,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    RUNS: tl.constexpr,
    GATED: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr,
    FINDS_PAIRS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    EVEN_I: tl.constexpr,
    EVEN_O: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
):
    if GATED:
        wait_for_inputs(EARLY)
    m_M = tl.arange(0, BLOCK_M)
    if FINDS_PAIRS:
        expert, pair_M, count, has_work = pairs_like(tl.program_id(1), experts_R, num_pairs, BLOCK_R, BLOCK_M)
        is_pair_M = m_M < count
    else:
        expert = tl.program_id(2)
        count = load_older(counts_E + expert)
        has_work = tl.program_id(1) * BLOCK_M < count
        m_M += tl.program_id(1) * BLOCK_M
        is_pair_M = m_M < count
        pair_M = load_older(pairs_ET + expert * num_rows + m_M, mask=is_pair_M, other=0)
    if not GATED:
        # The experts were chosen before the kernel before this one: they may be read before it has ended.
        wait_for_inputs(EARLY)
    if not has_work:
        return
    expert = expert.to(tl.int64)
    words_BOC = words_EBOC + expert * units * all_out * WORDS
    scale_BO = scale_EBO + expert * (units * all_out * RUNS if SCALING > 0 else all_out)
    factor_O = factor_EO + expert * all_out
    o_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    in_out_O = o_O < num_out
    c_C = tl.arange(0, WORDS)
    r_R = tl.arange(0, RUNS)
    x_at_M = (pair_M // PAIRS_A_ROW).to(tl.int64) * x_stride
    to_M = pair_M.to(tl.int64) * num_out
    # Weight first: tiles are weight [O, C], x [C, M], sums [O, M]. Else x [M, C], weight [C, O], sums [M, O].
    if WEIGHT_FIRST:
        words_at = words_BOC + o_O[:, None] * WORDS + c_C[None, :]
        scale_at = scale_BO + o_O[:, None] * RUNS + r_R[None, :]
        factor_at = factor_O + o_O[:, None]
        x_at = x_XI + x_at_M[None, :] + c_C[:, None]
        c_x = c_C[:, None]
        in_out = in_out_O[:, None]
        is_pair = is_pair_M[None, :]
        to = to_M[None, :] + o_O[:, None]
        acc = tl.zeros([BLOCK_O, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_O, BLOCK_M], tl.float32)
    else:
        words_at = words_BOC + o_O[None, :] * WORDS + c_C[:, None]
        scale_at = scale_BO + o_O[None, :] * RUNS + r_R[:, None]
        factor_at = factor_O + o_O[None, :]
        x_at = x_XI + x_at_M[:, None] + c_C[None, :]
        c_x = c_C[None, :]
        in_out = in_out_O[None, :]
        is_pair = is_pair_M[:, None]
        to = to_M[:, None] + o_O[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
    for unit in range(units):
        first = unit * (PLANES * WORDS)
        words_of_unit = words_at + unit * (all_out * WORDS)
        words = load_tile(words_of_unit, in_out, not EVEN_O)
        scales = words  # a name, where there are none
        if SCALING > 0:
            scales = load_tile(scale_at + unit * all_out * RUNS, in_out, not EVEN_O)
        x0, x1, x2, x3 = load_planes(x_at + first, num_in - first, c_x, is_pair, PLANES, WORDS, EVEN_I)
        acc = add_unit(acc, x0, x1, x2, x3, words, scales, CODE, SCALING, WEIGHT_FIRST)
        if GATED:
            words = load_tile(words_of_unit + num_out * WORDS, in_out, not EVEN_O)
            scales = words
            if SCALING > 0:
                scales = load_tile(scale_at + (unit * all_out + num_out) * RUNS, in_out, not EVEN_O)
            up = add_unit(up, x0, x1, x2, x3, words, scales, CODE, SCALING, WEIGHT_FIRST)

    dtype = out_RO.dtype.element_ty
    acc *= load_tile(factor_at, in_out, not EVEN_O)
    if GATED:
        up *= load_tile(factor_at + num_out, in_out, not EVEN_O)
        acc = gated_sums(acc, up, dtype, True)
    tl.store(out_RO + to, acc.to(dtype), mask=in_out & is_pair)
