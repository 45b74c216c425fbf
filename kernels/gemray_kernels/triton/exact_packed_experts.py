"""Routed experts on packed weights in exact numerics: a pair's bits follow its own row (`exact_experts`).

As in `packed_experts` words of experts that some row chose are read and no others; sums are those of
`exact_packed_linear`: one leaf of the first layer's inputs, the rank's leaves of the second's, added by the tree.

Shape legend: T rows, H hidden size, E experts, K experts a row, R = T K (row, expert) pairs, I inputs of a product,
O outputs, M pairs of one program, B units, C words of a unit, R runs of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from gemray_kernels.packed_product import ExactExpertProducts
from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.packed_weight import Scaling
from gemray_kernels.triton import few_rows_experts
from gemray_kernels.triton.activation import gated_sums
from gemray_kernels.triton.early_start import load_older, starts_early, wait_for_inputs
from gemray_kernels.triton.exact_packed_tree import packed_subtree
from gemray_kernels.triton.experts import pairs_of_experts
from gemray_kernels.triton.factor_parts import with_parts
from gemray_kernels.triton.few_rows_experts import pairs_like
from gemray_kernels.triton.many_rows_experts import block_of
from gemray_kernels.triton.packed_experts import PackedExpertTile
from gemray_kernels.triton.packed_linear import CODES, LEAST_LEFT, LEAST_RIGHT

SHORT_LEAF = 4
"""Units."""


class TiledExactExperts(ExactExpertProducts):
    """Experts whose weights are laid out in units, the second layer's leaf by leaf; rows are bfloat16."""

    def __init__(self, gate_up: TiledWeight, down: TiledWeight) -> None:
        """Experts of weights with a leading dimension, gate halves above up halves."""
        self._gate_up = with_parts(gate_up)
        self._down = with_parts(down)

    @override
    def outputs(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        return self._outputs(x_TH, experts_TK, x_TH.dtype)

    @override
    def subtrees(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        return self._outputs(x_TH, experts_TK, torch.float32)

    def _outputs(self, x_TH: Tensor, experts_TK: Tensor, dtype: torch.dtype) -> Tensor:
        num_rows, top_k = experts_TK.shape
        few = num_rows <= few_rows_experts.MOST_ROWS
        pairs = None if few else pairs_of_experts(experts_TK, self._down.words_BOC.shape[0])
        gated_RI = exact_expert_linear(x_TH, self._gate_up, experts_TK, top_k, x_TH.dtype, gated=True, pairs=pairs)
        outputs_RH = exact_expert_linear(gated_RI, self._down, experts_TK, 1, dtype, gated=False, pairs=pairs)
        return outputs_RH.view(num_rows, top_k, -1)


def tile_for(weight: TiledWeight, num_rows: int, *, gated: bool) -> PackedExpertTile:
    """Choose a tile by speed. Sums of other leaves, which wait for their neighbours, leave room for 64 outputs."""
    if weight.scaling is Scaling.EACH:  # whose scales take shared memory
        return PackedExpertTile(pairs=16, outputs=32, num_warps=4, num_stages=2)
    if num_rows <= LEAST_RIGHT and weight.code in ("int8", "fp8"):
        if gated:
            return PackedExpertTile(pairs=8, outputs=32, num_warps=2, num_stages=4 if num_rows == 1 else 3)
        return PackedExpertTile(pairs=8, outputs=64, num_warps=2, num_stages=3)
    if num_rows <= 256:
        if gated:
            return PackedExpertTile(pairs=16, outputs=32, num_warps=4, num_stages=4)
        return PackedExpertTile(pairs=16, outputs=64, num_warps=4, num_stages=3)
    return PackedExpertTile(pairs=64, outputs=64, num_warps=4, num_stages=3)


def exact_expert_linear(
    x_XI: Tensor,
    weight: TiledWeight,
    experts_TK: Tensor,
    pairs_a_row: int,
    out_dtype: torch.dtype,
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
        out_dtype: of the products.
        gated: whether the first half of the outputs gates the second by tanh-GELU, both rounded to `out_dtype` first.
        pairs: of each expert, with their counts; None, for at most 16 rows, where programs are to find them.
        tile: chosen by the number of rows when None; a pair's bits are the same in all of them.

    Raises:
        ValueError: rows or experts do not lie as said.
    """
    num_rows, top_k = experts_TK.shape
    num_pairs, num_in = num_rows * top_k, weight.num_in
    num_out = weight.num_out // 2 if gated else weight.num_out
    out_RO = torch.empty(num_pairs, num_out, dtype=out_dtype, device=x_XI.device)
    if num_rows == 0:
        return out_RO
    if x_XI.stride(1) != 1 or x_XI.shape[1] != num_in or not experts_TK.is_contiguous():
        raise ValueError(
            f"x {list(x_XI.shape)} with strides {x_XI.stride()} and experts with {experts_TK.stride()}: {num_in} "
            f"contiguous inputs and contiguous experts are allowed"
        )
    unit, scale_EBO = weight.unit, weight.scales_from(0)
    tile = tile or tile_for(weight, num_rows, gated=gated)
    num_experts, units = weight.words_BOC.shape[:2]
    # Short leaves are unrolled, so that what is loaded ahead is the next leaf's, too.
    in_one_step = weight.leaves > 1 and weight.units_of_leaf <= SHORT_LEAF
    align = 8 if weight.leaf % 8 == 0 else 1
    finds_pairs = pairs is None
    early = finds_pairs and starts_early(x_XI)
    outputs = triton.cdiv(num_out, tile.outputs)
    pairs_ET, counts_E = pairs or (experts_TK, experts_TK)
    # Listed pairs make a block an expert at least, the last of which may be empty.
    blocks = num_pairs if finds_pairs else triton.cdiv(num_pairs, tile.pairs) + num_experts
    grid = (outputs, blocks) if finds_pairs else (outputs * blocks, 1)
    _exact_expert_kernel[grid](
        x_XI,
        weight.words_BOC,
        scale_EBO,
        weight.factor_O,
        weight.parts_or_factors,
        experts_TK,
        pairs_ET,
        counts_E,
        out_RO,
        num_pairs,
        num_rows,
        num_experts,
        num_out,
        weight.num_out,
        units,
        weight.leaf // align,
        weight.units_of_leaf,
        weight.place,
        weight.scale_BO.shape[1],
        x_XI.stride(0),
        0,
        weight.leaves // 2,
        GROUP=weight.group,
        ALIGN=align,
        STEP=weight.units_of_leaf if in_one_step else 1,
        IN_ONE_STEP=in_one_step,
        LEAVES=weight.leaves,
        CODE=CODES[weight.code],
        SCALING=weight.scaling.value,
        PARTS=weight.parts,
        WORDS=unit.words,
        PLANES=unit.planes,
        RUNS=weight.runs,
        GATED=gated,
        PAIRS_A_ROW=pairs_a_row,
        FINDS_PAIRS=finds_pairs,
        BLOCK_R=few_rows_experts.block_of_pairs(num_pairs) if finds_pairs else 16,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_M=tile.pairs,
        BLOCK_O=tile.outputs,
        EVEN_I=weight.leaf % unit.inputs == 0,
        EVEN_O=num_out % tile.outputs == 0,
        WEIGHT_FIRST=tile.pairs > 32 or tile.pairs < LEAST_LEFT,
        EARLY=early,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=early,
    )
    return out_RO


@triton.jit(do_not_specialize=["num_pairs", "num_rows", "units_of_leaf", "groups"])  # type: ignore[untyped-decorator]
def _exact_expert_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    x_XI,
    words_EBOC,
    scale_EBO,
    factor_EO,
    parts_EO,
    experts_R,
    pairs_ET,
    counts_E,
    out_RO,
    num_pairs,
    num_rows,
    num_experts,
    num_out,
    all_out,
    units,
    leaf_units,
    units_of_leaf,
    place,
    groups,
    x_stride,
    parts_stride,
    num_twins,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
    STEP: tl.constexpr,
    IN_ONE_STEP: tl.constexpr,
    LEAVES: tl.constexpr,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    RUNS: tl.constexpr,
    GATED: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr,
    FINDS_PAIRS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
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
        column = tl.program_id(0)
        expert, pair_M, count, has_work = pairs_like(tl.program_id(1), experts_R, num_pairs, BLOCK_R, BLOCK_M)
        is_pair_M = m_M < count
    else:
        columns = tl.cdiv(num_out, BLOCK_O)
        column = tl.program_id(0) % columns
        expert, first_pair, count = block_of(tl.program_id(0) // columns, counts_E, num_experts, BLOCK_M, BLOCK_E)
        has_work = first_pair < count
        m_M += first_pair
        is_pair_M = m_M < count
        pair_M = load_older(pairs_ET + expert.to(tl.int64) * num_rows + m_M, mask=is_pair_M, other=0)
    if not GATED:
        # The experts were chosen before the kernel before this one: they may be read before it has ended.
        wait_for_inputs(EARLY)
    if not has_work:
        return
    expert = expert.to(tl.int64)
    words_BOC = words_EBOC + expert * units * all_out * WORDS
    scale_BO = scale_EBO + expert * (groups * all_out * RUNS if SCALING > 0 else all_out)
    o_O = column * BLOCK_O + tl.arange(0, BLOCK_O)
    out_at = expert * all_out + o_O
    in_out_O = o_O < num_out
    c_C = tl.arange(0, WORDS)
    r_R = tl.arange(0, RUNS)
    x_at_M = (pair_M // PAIRS_A_ROW).to(tl.int64) * x_stride
    to_M = pair_M.to(tl.int64) * num_out
    # Weight first: tiles are weight [O, C], x [C, M], sums [O, M]. Else x [M, C], weight [C, O], sums [M, O].
    if WEIGHT_FIRST:
        words_at = words_BOC + o_O[:, None] * WORDS + c_C[None, :]
        scale_at = scale_BO + o_O[:, None] * RUNS + r_R[None, :]
        factor_at = factor_EO + out_at[:, None]
        parts_at = parts_EO + out_at[:, None]
        x_at = x_XI + x_at_M[None, :] + c_C[:, None]
        c_x = c_C[:, None]
        place += c_C[None, :]
        in_out = in_out_O[:, None]
        is_pair = is_pair_M[None, :]
        to = to_M[None, :] + o_O[:, None]
    else:
        words_at = words_BOC + o_O[None, :] * WORDS + c_C[:, None]
        scale_at = scale_BO + o_O[None, :] * RUNS + r_R[:, None]
        factor_at = factor_EO + out_at[None, :]
        parts_at = parts_EO + out_at[None, :]
        x_at = x_XI + x_at_M[:, None] + c_C[None, :]
        c_x = c_C[None, :]
        place += c_C[:, None]
        in_out = in_out_O[None, :]
        is_pair = is_pair_M[:, None]
        to = to_M[:, None] + o_O[None, :]
    leaf = leaf_units * ALIGN
    result, up = packed_subtree(
        x_at, words_at, scale_at, factor_at, parts_at, is_pair, in_out, c_x, leaf, units_of_leaf, place, groups,
        all_out * WORDS, all_out * RUNS, parts_stride, num_twins, num_out, GROUP, STEP, IN_ONE_STEP, LEAVES, CODE,
        SCALING, PARTS, WORDS, PLANES, RUNS, GATED, EVEN_I, EVEN_O, WEIGHT_FIRST,
    )  # fmt: skip
    dtype = out_RO.dtype.element_ty
    if GATED:
        result = gated_sums(result, up, dtype, True)
    tl.store(out_RO + to, result.to(dtype), mask=in_out & is_pair)
