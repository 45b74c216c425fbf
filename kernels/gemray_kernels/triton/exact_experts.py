"""Routed experts in exact numerics: a (row, expert) pair's bits follow its own row, whoever shares a call or a weight.

Every sum of the first product runs over all of a row's inputs in order, whatever the tile, and ranks share its outputs:
it is the product of fast numerics (`experts`, `few_rows_experts`). Of the second one ranks share the inputs, which are
cut into the leaves of `gemray_kernels.numerics`; a program adds up all of its rank's.

Shape legend: T rows, H hidden size, E experts, K experts a row, R = T K (row, expert) pairs, I expert width (the local
one), M pairs of one program, N outputs of one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.layout import require_contiguous, require_rows
from gemray_kernels.precision import compute_dtype
from gemray_kernels.reference.exact_linear import check_leaves
from gemray_kernels.triton import experts, few_rows_experts
from gemray_kernels.triton.dot import dot
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs
from gemray_kernels.triton.expert_tile import ExpertTile
from gemray_kernels.triton.few_rows_experts import pairs_like
from gemray_kernels.triton.many_rows_experts import block_of, num_programs
from gemray_kernels.triton.packed_linear import finished

SHARED_BYTES = 220 * 1024
"""Shared memory for leaves that are loaded ahead of their use; two programs of 4 warps share a multiprocessor's."""


def expert_outputs(
    x_TH: Tensor,
    experts_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    leaves: int,
    tile: ExpertTile | None = None,
) -> Tensor:
    """As `gemray_kernels.reference.exact_experts.expert_outputs`; `tile` of the second product, chosen when None."""
    return _outputs(x_TH, experts_TK, gate_up_E2IH, down_EHI, leaves, x_TH.dtype, tile)


def expert_subtrees(
    x_TH: Tensor,
    experts_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    leaves: int,
    tile: ExpertTile | None = None,
) -> Tensor:
    """As `gemray_kernels.reference.exact_experts.expert_subtrees`; `tile` of the second product, chosen when None."""
    return _outputs(x_TH, experts_TK, gate_up_E2IH, down_EHI, leaves, compute_dtype(x_TH.dtype), tile)


def down_tile(dtype: torch.dtype, num_rows: int, leaf: int) -> ExpertTile:
    """Choose a tile of the second product by speed: a row's bits are the same in all of them.

    Args:
        dtype: of the weights.
        num_rows: of the call.
        leaf: inputs of one leaf; a program loads two whole ones ahead of their use.
    """
    if dtype == torch.float32:
        return ExpertTile(pairs=16, outputs=32, inputs=32, num_warps=4, num_stages=2)
    many = num_rows > experts.MANY_ROWS
    pairs, outputs, num_warps = (64, 128, 8) if many else (16, 64, 4)
    stage = (pairs + outputs) * 2 * -(-leaf // 32) * 32 * dtype.itemsize
    stages = max(1, min(SHARED_BYTES // (2 if num_warps == 4 else 1) // stage, 3))
    return ExpertTile(pairs, outputs, inputs=64, num_warps=num_warps, num_stages=stages, weight_first=many)


def _outputs(
    x_TH: Tensor,
    experts_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    leaves: int,
    dtype: torch.dtype,
    tile: ExpertTile | None,
) -> Tensor:
    require_rows(x=x_TH)
    require_contiguous(experts=experts_TK, gate_up=gate_up_E2IH, down=down_EHI)
    num_rows, top_k = experts_TK.shape
    num_experts, hidden_size, width = down_EHI.shape
    check_leaves(width, leaves)
    leaf = width // leaves
    tile = tile or down_tile(x_TH.dtype, num_rows, leaf)
    left = tile.outputs if tile.weight_first else tile.pairs
    if left >= 64 and left < 16 * tile.num_warps:  # by wgmma, which would compute rows twice
        raise ValueError(f"{tile.num_warps} warps on {left} rows: at most one warp for 16 rows is allowed")
    outputs_TKH = torch.empty(num_rows, top_k, hidden_size, dtype=dtype, device=x_TH.device)
    if num_rows == 0:
        return outputs_TKH
    block = max(16, min(tile.inputs, 1 << leaf.bit_length() - 1))
    common = {
        "LEAVES": leaves,
        "LEAF": leaf,
        "BLOCK_M": tile.pairs,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": block,
        "REST": max(16, triton.next_power_of_2(leaf % block)),
        "EVEN": hidden_size % tile.outputs == 0,
        "WEIGHT_FIRST": tile.weight_first,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    if num_rows <= few_rows_experts.MOST_ROWS:
        early = starts_early(x_TH)
        up, _ = few_rows_experts.tiles_for(x_TH.dtype)
        gated_RI = few_rows_experts.gated(x_TH, experts_TK, gate_up_E2IH, up)
        _few_rows_kernel[(triton.cdiv(hidden_size, tile.outputs), num_rows * top_k)](
            gated_RI,
            down_EHI,
            experts_TK,
            outputs_TKH,
            num_rows * top_k,
            hidden_size,
            leaves // 2,
            **common,
            BLOCK_R=few_rows_experts.block_of_pairs(num_rows * top_k),
            EARLY=early,
            launch_pdl=early,
        )
        return outputs_TKH
    pairs_ET, counts_E = experts.pairs_of_experts(experts_TK, num_experts)
    gated_RI = experts.gated(x_TH, pairs_ET, counts_E, gate_up_E2IH, top_k)
    _listed_rows_kernel[num_programs(num_rows * top_k, num_experts, hidden_size, tile)](
        gated_RI,
        down_EHI,
        pairs_ET,
        counts_E,
        outputs_TKH,
        num_rows,
        num_experts,
        hidden_size,
        leaves // 2,
        **common,
        BLOCK_E=triton.next_power_of_2(num_experts),
    )
    return outputs_TKH


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]
def _few_rows_kernel(  # type: ignore[no-untyped-def]
    gated_RI,
    down_EHI,
    experts_R,
    out_RH,
    num_pairs,
    num_out,
    num_twins,
    LEAVES: tl.constexpr,
    LEAF: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    REST: tl.constexpr,
    EVEN: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
):
    # The experts were chosen before the kernel before this one: they may be read before it has ended.
    expert, pair_M, count, is_first = pairs_like(tl.program_id(1), experts_R, num_pairs, BLOCK_R, BLOCK_M)
    wait_for_inputs(EARLY)
    if not is_first:
        return
    is_pair_M = tl.arange(0, BLOCK_M) < count
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    _down(
        gated_RI, down_EHI, out_RH, expert, pair_M, is_pair_M, n_N, num_out, num_twins, LEAVES, LEAF, BLOCK_M, BLOCK_N,
        BLOCK_K, REST, EVEN, WEIGHT_FIRST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _listed_rows_kernel(  # type: ignore[no-untyped-def]
    gated_RI,
    down_EHI,
    pairs_ET,
    counts_E,
    out_RH,
    num_rows,
    num_experts,
    num_out,
    num_twins,
    LEAVES: tl.constexpr,
    LEAF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    REST: tl.constexpr,
    EVEN: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    columns = tl.cdiv(num_out, BLOCK_N)
    expert, first_pair, count = block_of(tl.program_id(0) // columns, counts_E, num_experts, BLOCK_M, BLOCK_E)
    if first_pair >= count:
        return
    m_M = first_pair + tl.arange(0, BLOCK_M)
    is_pair_M = m_M < count
    pair_M = tl.load(pairs_ET + expert.to(tl.int64) * num_rows + m_M, mask=is_pair_M, other=0)
    n_N = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    _down(
        gated_RI, down_EHI, out_RH, expert, pair_M, is_pair_M, n_N, num_out, num_twins, LEAVES, LEAF, BLOCK_M, BLOCK_N,
        BLOCK_K, REST, EVEN, WEIGHT_FIRST,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _down(  # type: ignore[no-untyped-def]
    gated_RI,
    down_EHI,
    out_RH,
    expert,
    pair_M,
    is_pair_M,
    n_N,
    num_out,
    num_twins,
    LEAVES: tl.constexpr,
    LEAF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    REST: tl.constexpr,
    EVEN: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """Some pairs' sums over LEAVES leaves, in `num_twins` pairs, added by the tree and stored."""
    pair_M = pair_M.to(tl.int64)
    is_out_N = n_N < num_out
    pair_at_M = gated_RI + pair_M * (LEAVES * LEAF)
    weight_at_N = down_EHI + (expert.to(tl.int64) * num_out + n_N) * (LEAVES * LEAF)
    # Tiles are weight [N, K], pairs [K, M], sums [N, M]; or pairs [M, K], weight [K, N], sums [M, N].
    if WEIGHT_FIRST:
        left, right = weight_at_N[:, None], pair_at_M[None, :]
        in_left, in_right = is_out_N[:, None], is_pair_M[None, :]
        to = out_RH + (pair_M * num_out)[None, :] + n_N[:, None]
    else:
        left, right = pair_at_M[:, None], weight_at_N[None, :]
        in_left, in_right = is_pair_M[:, None], is_out_N[None, :]
        to = out_RH + (pair_M * num_out)[:, None] + n_N[None, :]
    LEFT_EVEN: tl.constexpr = EVEN and WEIGHT_FIRST
    RIGHT_EVEN: tl.constexpr = EVEN and not WEIGHT_FIRST
    if LEAVES == 1:
        result = _leaf(left, right, in_left, in_right, LEAF, BLOCK_K, REST, LEFT_EVEN, RIGHT_EVEN)
    else:
        # Sums of two leaves and of four that wait for their neighbours to the right.
        two = tl.zeros(to.shape, tl.float32)
        four = tl.zeros(to.shape, tl.float32)
        result = tl.zeros(to.shape, tl.float32)
        # Not LEAVES // 2, which ptxas would know: see `dot`.
        for twins in range(num_twins):
            at = twins * (2 * LEAF)
            result = _leaf(left + at, right + at, in_left, in_right, LEAF, BLOCK_K, REST, LEFT_EVEN, RIGHT_EVEN)
            at += LEAF
            result += _leaf(left + at, right + at, in_left, in_right, LEAF, BLOCK_K, REST, LEFT_EVEN, RIGHT_EVEN)
            if twins % 2 == 0:
                two = result
            else:
                result += two
                if twins % 4 == 1:
                    four = result
                else:
                    result += four
    tl.store(to, result.to(out_RH.dtype.element_ty), mask=in_left & in_right)


@triton.jit  # type: ignore[untyped-decorator]
def _leaf(  # type: ignore[no-untyped-def]
    left,
    right,
    in_left,
    in_right,
    LEAF: tl.constexpr,
    BLOCK_K: tl.constexpr,
    REST: tl.constexpr,
    LEFT_EVEN: tl.constexpr,
    RIGHT_EVEN: tl.constexpr,
):
    """One leaf's sums, over its inputs in order: in whole blocks, and the rest in a block that is part empty.

    `left` points to the first inputs of the left operand's rows, `right` to those of the right one's columns, all of
    which exist where they are EVEN.
    """
    result = tl.zeros([left.shape[0], right.shape[1]], tl.float32)
    for block in tl.static_range(LEAF // BLOCK_K):
        k_K = block * BLOCK_K + tl.arange(0, BLOCK_K)
        a = tl.load(left + k_K[None, :]) if LEFT_EVEN else tl.load(left + k_K[None, :], mask=in_left, other=0.0)
        b = tl.load(right + k_K[:, None]) if RIGHT_EVEN else tl.load(right + k_K[:, None], mask=in_right, other=0.0)
        result = dot(a, b, result)
    if LEAF % BLOCK_K > 0:
        k_K = LEAF // BLOCK_K * BLOCK_K + tl.arange(0, REST)
        a_mask = k_K[None, :] < LEAF
        b_mask = k_K[:, None] < LEAF
        if not LEFT_EVEN:
            a_mask = a_mask & in_left
        if not RIGHT_EVEN:
            b_mask = b_mask & in_right
        a = tl.load(left + k_K[None, :], mask=a_mask, other=0.0)
        b = tl.load(right + k_K[:, None], mask=b_mask, other=0.0)
        result = dot(a, b, result)
    # Else Triton would make a leaf of one block, added to another, one product that begins with the other's sum.
    return finished(result)
