"""The programs of `triton.paged_attention`: of a block of rows, a KV head and a chunk of keys; and one that combines.

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
D head dim, M = (row, query head) pairs of one program, L keys of one tile, C chunks of a sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemray_kernels.triton.attend_spans import chunk_keys_of, combined, ends_at_once, find_row, find_span, first_key
from gemray_kernels.triton.dot import dot
from gemray_kernels.triton.early_start import let_next_start, load_older, wait_for_inputs, wait_having_let


@triton.jit  # type: ignore[untyped-decorator]
def attend_keys(  # type: ignore[no-untyped-def]
    q_MD,
    position_M,
    is_row_M,
    k_pages,
    v_pages,
    table_P,
    begin,
    end,
    in_slot,
    scale_log2,
    page_stride,
    slot_stride,
    v_scale,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Softmax over the keys [begin, end): the largest score of each pair, the sum of its weights, its weighted sum."""
    BLOCK_M: tl.constexpr = q_MD.shape[0]
    BLOCK_D: tl.constexpr = q_MD.shape[1]
    d_D = tl.arange(0, BLOCK_D)
    in_head_D = d_D < HEAD_DIM
    largest_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(begin // BLOCK_L * BLOCK_L, end, BLOCK_L):
        key_L = first + tl.arange(0, BLOCK_L)
        # Slots outside are never read: they may hold anything, and 0 · NaN is NaN.
        inside_L = (key_L >= begin) & (key_L < end)
        page_L = tl.load(table_P + key_L // PAGE_SIZE, mask=inside_L, other=0).to(tl.int64)
        at_L = page_L * page_stride + (key_L % PAGE_SIZE) * slot_stride + in_slot
        k_DL = tl.load(k_pages + at_L[None, :] + d_D[:, None], mask=inside_L[None, :] & in_head_D[:, None], other=0.0)
        if v_scale is not None:
            k_DL = k_DL.to(q_MD.dtype)
        score_ML = dot(q_MD, k_DL, tl.zeros([BLOCK_M, BLOCK_L], tl.float32)) * scale_log2
        visible_ML = inside_L[None, :] & is_row_M[:, None]
        if CAUSAL:
            visible_ML = visible_ML & (key_L[None, :] <= position_M[:, None])
        if WINDOW > 0:
            visible_ML = visible_ML & (key_L[None, :] > position_M[:, None] - WINDOW)
        score_ML = tl.where(visible_ML, score_ML, float("-inf"))
        new_largest_M = tl.maximum(largest_M, tl.max(score_ML, axis=1))
        shift_M = tl.where(new_largest_M == float("-inf"), 0.0, new_largest_M)  # nothing seen yet
        weight_ML = tl.exp2(score_ML - shift_M[:, None])
        rescale_M = tl.exp2(largest_M - shift_M)
        sum_M = sum_M * rescale_M + tl.sum(weight_ML, axis=1)
        largest_M = new_largest_M
        v_LD = tl.load(v_pages + at_L[:, None] + d_D[None, :], mask=inside_L[:, None] & in_head_D[None, :], other=0.0)
        if v_scale is not None:
            v_LD = v_LD.to(q_MD.dtype)
        acc_MD = acc_MD * rescale_M[:, None]
        acc_MD = dot(weight_ML.to(v_LD.dtype), v_LD, acc_MD)
    if v_scale is not None:
        acc_MD = acc_MD * v_scale
    return largest_M, sum_M, acc_MD


@triton.jit  # type: ignore[untyped-decorator]
def store_attended(  # type: ignore[no-untyped-def]
    largest_M,
    sum_M,
    acc_MD,
    is_direct,
    is_row_M,
    row_M,
    slot_M,
    head_M,
    out_TND,
    partial_o,
    partial_ml,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GRID_CHUNKS: tl.constexpr,
):
    """Store what rows attended: of the only chunk the result, else the chunk's part in the rows' slots."""
    d_D = tl.arange(0, acc_MD.shape[1])
    is_stored_MD = is_row_M[:, None] & (d_D < HEAD_DIM)[None, :]
    if is_direct:
        acc_MD = acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]  # rows that see no key give zeros
        out_at_M = (row_M.to(tl.int64) * NUM_HEADS + head_M) * HEAD_DIM
        tl.store(out_TND + out_at_M[:, None] + d_D[None, :], acc_MD.to(out_TND.dtype.element_ty), mask=is_stored_MD)
    else:
        partial_M = (slot_M.to(tl.int64) * NUM_HEADS + head_M) * GRID_CHUNKS + tl.program_id(2)
        tl.store(partial_o + partial_M[:, None] * HEAD_DIM + d_D[None, :], acc_MD, mask=is_stored_MD)
        tl.store(partial_ml + partial_M * 2, largest_M, mask=is_row_M)
        tl.store(partial_ml + partial_M * 2 + 1, sum_M, mask=is_row_M)


@triton.jit(do_not_specialize=["num_seqs", "blocks_per_seq"])  # type: ignore[untyped-decorator]
def attend_kernel(  # type: ignore[no-untyped-def]
    q_TND,
    k_pages,
    v_pages,
    table_SP,
    query_start_Z,
    kv_len_S,
    out_TND,
    partial_o,
    partial_ml,
    num_seqs,
    blocks_per_seq,
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
    MOST_CHUNKS: tl.constexpr,
    GRID_CHUNKS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    MAX_SPLIT_ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Attend with one block of rows over one chunk of keys.

    `v_scale` is None but where pages hold 8-bit floats; `scale_log2` then has the scale of the keys in it. What says
    whose rows and pages these are is older than all that runs.
    """
    let_next_start(EARLY)
    sequence, start, first_row, num_rows, kv_len, begin, end, is_direct, is_idle = find_span(
        query_start_Z,
        kv_len_S,
        num_seqs,
        blocks_per_seq,
        WINDOW,
        CAUSAL,
        GROUP,
        MOST_CHUNKS,
        MIN_CHUNK,
        MAX_SPLIT_ROWS,
        BLOCK_S,
        BLOCK_ROWS,
        SEARCH,
    )
    if ends_at_once(is_idle):
        return
    kv_head = tl.program_id(1)
    in_slot = kv_head * kv_head_stride
    table_P = table_SP + sequence.to(tl.int64) * table_stride
    wait_having_let(EARLY)
    if is_idle:
        return

    pair_M = tl.arange(0, BLOCK_M)
    row_M = first_row + pair_M // GROUP
    head_M = kv_head * GROUP + pair_M % GROUP
    is_row_M = (pair_M < BLOCK_ROWS * GROUP) & (row_M < num_rows)
    d_D = tl.arange(0, BLOCK_D)
    in_head_D = d_D < HEAD_DIM
    q_at_M = (start + row_M).to(tl.int64) * q_row_stride + head_M * q_head_stride
    q_MD = tl.load(q_TND + q_at_M[:, None] + d_D[None, :], mask=is_row_M[:, None] & in_head_D[None, :], other=0.0)
    largest_M, sum_M, acc_MD = attend_keys(
        q_MD,
        kv_len - num_rows + row_M,
        is_row_M,
        k_pages,
        v_pages,
        table_P,
        begin,
        end,
        in_slot,
        scale_log2,
        page_stride,
        slot_stride,
        v_scale,
        WINDOW,
        CAUSAL,
        HEAD_DIM,
        PAGE_SIZE,
        BLOCK_L,
    )
    slot_M = row_M + (start if BY_ROW else sequence * MAX_SPLIT_ROWS)
    store_attended(
        largest_M,
        sum_M,
        acc_MD,
        is_direct,
        is_row_M,
        start + row_M,
        slot_M,
        head_M,
        out_TND,
        partial_o,
        partial_ml,
        NUM_HEADS,
        HEAD_DIM,
        GRID_CHUNKS,
    )


@triton.jit(do_not_specialize=["num_seqs"])  # type: ignore[untyped-decorator]
def combine_kernel(  # type: ignore[no-untyped-def]
    out_TND,
    partial_o,
    partial_ml,
    query_start_Z,
    kv_len_S,
    num_seqs,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
    GRID_CHUNKS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    MAX_SPLIT_ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_C: tl.constexpr,
    LETS_AT_ONCE: tl.constexpr,
):
    """Combine one row's and head's partial softmaxes."""
    if LETS_AT_ONCE:
        let_next_start(EARLY)
    slot = tl.program_id(0)
    head = tl.program_id(1)
    # What says whose rows these are is older than all that runs, and may be read.
    sequence, start, row = find_row(slot, query_start_Z, num_seqs, BLOCK_S, MAX_SPLIT_ROWS, BY_ROW)
    num_rows = load_older(query_start_Z + sequence + 1).to(tl.int32) - start
    kv_len = load_older(kv_len_S + sequence, mask=row < num_rows, other=0).to(tl.int32)
    # No program ends without waiting: the next kernel waits for this one, and by it for the one before.
    if LETS_AT_ONCE:
        wait_having_let(EARLY)
    else:
        wait_for_inputs(EARLY)
    if row >= num_rows or num_rows > MAX_SPLIT_ROWS:
        return
    chunk_keys = chunk_keys_of(num_rows, kv_len, WINDOW, GROUP, MOST_CHUNKS, MIN_CHUNK)
    first_chunk = first_key(kv_len - num_rows, WINDOW) // chunk_keys
    if (kv_len - 1) // chunk_keys - first_chunk < 1:
        return

    # The chunks that hold keys of this row; the others' partial results were never written.
    position = kv_len - num_rows + row
    begin = first_key(position, WINDOW)
    end = kv_len
    if CAUSAL:
        end = position + 1
    chunk_C = tl.arange(0, BLOCK_C)
    key_C = (first_chunk + chunk_C) * chunk_keys
    holds_C = (key_C < end) & (key_C + chunk_keys > begin) & (chunk_C < GRID_CHUNKS)
    partial_C = (slot.to(tl.int64) * NUM_HEADS + head) * GRID_CHUNKS + chunk_C
    d_D = tl.arange(0, BLOCK_D)
    in_head_D = d_D < HEAD_DIM
    # All loads come before the sums, whose steps wait for each other.
    largest_C = tl.load(partial_ml + partial_C * 2, mask=holds_C, other=float("-inf"))
    sum_C = tl.load(partial_ml + partial_C * 2 + 1, mask=holds_C, other=0.0)
    o_CD = tl.load(
        partial_o + partial_C[:, None] * HEAD_DIM + d_D[None, :], mask=holds_C[:, None] & in_head_D[None, :], other=0.0
    )
    o_D = combined(largest_C, sum_C, o_CD)
    out_at = ((start + row).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_TND + out_at + d_D, o_D.to(out_TND.dtype.element_ty), mask=in_head_D)
