"""The program of `triton.paged_attention` for prompt chunks, sequences of many rows: a block of rows over all its keys.

Most tiles of keys are seen whole by every row of a block: they are attended without masks, and those at the edge of the
window and on the diagonal with them, behind a branch.

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
D head dim, M = (row, query head) pairs of one program, L keys of one tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemray_kernels.triton.attend_spans import find_rows
from gemray_kernels.triton.dot import dot
from gemray_kernels.triton.early_start import wait_for_inputs


@triton.jit(do_not_specialize=["num_seqs"])  # type: ignore[untyped-decorator]
def attend_long_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    q_TND,
    k_pages,
    v_pages,
    table_SP,
    query_start_Z,
    kv_len_S,
    out_TND,
    num_seqs,
    scale_log2,
    q_row_stride,
    q_head_stride,
    page_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    v_scale,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Attend with one block of rows, of a sequence of more than `FEW_ROWS`, over all keys that it sees.

    `v_scale` is None but where pages hold 8-bit floats; `scale_log2` then has the scale of the keys in it.
    """
    wait_for_inputs(EARLY)
    # The last blocks of a chunk see the most keys, so they begin first and the short ones fill the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence, start, first_row = find_rows(block, query_start_Z, num_seqs, BLOCK_S, BLOCK_ROWS)
    num_rows = tl.load(query_start_Z + sequence + 1).to(tl.int32) - start
    kv_len = tl.load(kv_len_S + sequence).to(tl.int32)
    if first_row >= num_rows or num_rows <= FEW_ROWS:
        return

    pair_M = tl.arange(0, BLOCK_M)
    row_M = first_row + pair_M // GROUP
    head_M = kv_head * GROUP + pair_M % GROUP
    is_row_M = (pair_M < BLOCK_ROWS * GROUP) & (row_M < num_rows)
    position_M = tl.where(is_row_M, kv_len - num_rows + row_M, -1)
    first_position = kv_len - num_rows + first_row
    last_position = kv_len - num_rows + tl.minimum(first_row + BLOCK_ROWS, num_rows) - 1

    # Keys [begin, end) are seen by some row of this block, those of tiles [whole, part) by all.
    begin = 0
    end = kv_len
    whole = 0
    part = kv_len // BLOCK_L * BLOCK_L
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
        whole = (tl.maximum(last_position - WINDOW + 1, 0) + BLOCK_L - 1) // BLOCK_L * BLOCK_L
    if CAUSAL:
        end = tl.maximum(last_position + 1, 0)  # padding has rows before the first key, which get zeros
        part = tl.maximum(first_position + 1, 0) // BLOCK_L * BLOCK_L
    first = begin // BLOCK_L * BLOCK_L
    whole = tl.minimum(tl.maximum(whole, first), (end + BLOCK_L - 1) // BLOCK_L * BLOCK_L)
    part = tl.maximum(part, whole)

    d_D = tl.arange(0, BLOCK_D)
    in_head_D = d_D < HEAD_DIM
    q_at_M = (start + row_M).to(tl.int64) * q_row_stride + head_M * q_head_stride
    q_MD = tl.load(q_TND + q_at_M[:, None] + d_D[None, :], mask=is_row_M[:, None] & in_head_D[None, :], other=0.0)
    largest_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_P = table_SP + sequence.to(tl.int64) * table_stride
    k_pages += kv_head * kv_head_stride
    v_pages += kv_head * kv_head_stride
    for tile in range(first, end, BLOCK_L):
        key_L = tile + tl.arange(0, BLOCK_L)
        # Slots outside are never read: they may hold anything, and 0 · NaN is NaN.
        inside_L = (key_L >= begin) & (key_L < end)
        page_L = tl.load(table_P + key_L // PAGE_SIZE, mask=inside_L, other=0)
        at_L = page_L.to(tl.int64) * page_stride + (key_L % PAGE_SIZE) * slot_stride
        # Keys are loaded as the values are, so that both loads share their addresses.
        at_LD = at_L[:, None] + d_D[None, :]
        is_read_LD = in_head_D[None, :] & inside_L[:, None]
        k_LD = tl.load(k_pages + at_LD, mask=is_read_LD, other=0.0)
        k_DL = tl.trans(k_LD).to(q_MD.dtype)  # 8-bit floats are widened
        score_ML = dot(q_MD, k_DL, tl.zeros([BLOCK_M, BLOCK_L], tl.float32))
        # The branch also makes the compiler share the keys of a score between two groups of warps at head dim 512.
        if (tile < whole) | (tile >= part):
            visible_ML = inside_L[None, :] & (position_M >= 0)[:, None]
            if CAUSAL:
                visible_ML = visible_ML & (key_L[None, :] <= position_M[:, None])
            if WINDOW > 0:
                visible_ML = visible_ML & (key_L[None, :] > position_M[:, None] - WINDOW)
            score_ML = tl.where(visible_ML, score_ML, float("-inf"))
        new_largest_M = tl.maximum(largest_M, tl.max(score_ML, axis=1) * scale_log2)
        shift_M = tl.where(new_largest_M == float("-inf"), 0.0, new_largest_M)  # nothing seen yet
        weight_ML = tl.exp2(score_ML * scale_log2 - shift_M[:, None])
        rescale_M = tl.exp2(largest_M - shift_M)
        sum_M = sum_M * rescale_M + tl.sum(weight_ML, axis=1)
        largest_M = new_largest_M
        v_LD = tl.load(v_pages + at_LD, mask=is_read_LD, other=0.0).to(q_MD.dtype)
        acc_MD = dot(weight_ML.to(v_LD.dtype), v_LD, acc_MD * rescale_M[:, None])

    if v_scale is not None:
        acc_MD = acc_MD * v_scale
    acc_MD = acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
    out_at_M = ((start + row_M).to(tl.int64) * NUM_HEADS + head_M) * HEAD_DIM
    tl.store(
        out_TND + out_at_M[:, None] + d_D[None, :],
        acc_MD.to(out_TND.dtype.element_ty),
        mask=is_row_M[:, None] & in_head_D[None, :],
    )
