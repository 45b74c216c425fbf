"""The programs of exact attention for few rows of a sequence: a block of rows and some chunks of keys; one that adds.

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
D head dim, M = (row, query head) pairs of one program, L keys of one tile, C chunks of a sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemray_kernels.triton.attend_spans import find_row, find_rows
from gemray_kernels.triton.dot import INTERPRETED, dot
from gemray_kernels.triton.early_start import wait_for_inputs
from gemray_kernels.triton.exact_softmax import (
    ONES,
    chunk_of,
    chunk_start,
    finite,
    power_of_two,
    shift_of,
    weights_of,
)

UNROLLED = tl.constexpr(8)
"""Chunks whose partial sums are loaded together."""


@triton.jit  # type: ignore[untyped-decorator]
def _first_key(position, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key that a query at `position` sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    return first


@triton.jit  # type: ignore[untyped-decorator]
def _widened(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """8-bit floats in a wider dtype, behind a copy through which the compiler does not see what they were.

    It would load four neighbours to a thread, for that is a register of them, and give ``mma.sync`` the inputs in the
    order 0, 1, 4, 5, 8, 9, ...: steps of sixteen then have other inputs than in other programs, and sums other digits.
    """
    wide = x.to(dtype)
    if wide.dtype == tl.bfloat16 and not INTERPRETED:
        wide = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [wide], dtype=tl.bfloat16, is_pure=False, pack=2)
    return wide


@triton.jit(do_not_specialize=["num_seqs", "blocks_per_seq"])  # type: ignore[untyped-decorator]
def attend_exact_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0912, PLR0915
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
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
    MAX_SPLIT_ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
    GRID: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    SEARCH: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attend with one block of rows over its share of the chunks, or without SPLIT over all, which it adds up."""
    wait_for_inputs(EARLY)
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    if SEARCH:
        sequence, start, first_row = find_rows(block, query_start_Z, num_seqs, BLOCK_S, BLOCK_ROWS)
    else:
        sequence = block // blocks_per_seq
        start = tl.load(query_start_Z + sequence).to(tl.int32)
        first_row = (block % blocks_per_seq) * BLOCK_ROWS
    num_rows = tl.load(query_start_Z + sequence + 1).to(tl.int32) - start
    kv_len = tl.load(kv_len_S + sequence).to(tl.int32)
    # Rows that see no key, padding among them, are few rows however many there are: they get their zeros here.
    if first_row >= num_rows or (num_rows > MAX_SPLIT_ROWS and kv_len > 0):
        return

    pair_M = tl.arange(0, BLOCK_M)
    row_M = first_row + pair_M // GROUP
    head_M = kv_head * GROUP + pair_M % GROUP
    is_row_M = (pair_M < BLOCK_ROWS * GROUP) & (row_M < num_rows)
    position_M = kv_len - num_rows + row_M
    last_row = tl.minimum(first_row + BLOCK_ROWS, num_rows) - 1

    GROWS: tl.constexpr = WINDOW == 0
    begin = tl.maximum(_first_key(kv_len - num_rows + first_row, WINDOW), 0)
    end = tl.maximum(kv_len - num_rows + last_row + 1, 0)
    base = chunk_of(tl.maximum(_first_key(kv_len - num_rows, WINDOW), 0), CHUNK, GROWS)
    is_direct = chunk_of(tl.maximum(kv_len - 1, 0), CHUNK, GROWS) == base
    first_chunk = chunk_of(begin, CHUNK, GROWS)
    chunks_end = tl.where(end > begin, chunk_of(tl.maximum(end - 1, 0), CHUNK, GROWS) + 1, first_chunk)
    stride = 1
    if SPLIT:
        if is_direct:
            if tl.program_id(2) > 0:
                return
        else:
            # Chunk c of the sequence is program (c - base)'s, over again from the first where programs are fewer.
            stride = tl.num_programs(2)
            behind = first_chunk - base - tl.program_id(2)
            first_chunk = base + tl.program_id(2) + (tl.maximum(behind, 0) + stride - 1) // stride * stride
            if first_chunk >= chunks_end:
                return

    d_D = tl.arange(0, BLOCK_D)
    in_head_D = d_D < HEAD_DIM
    q_at_M = (start + row_M).to(tl.int64) * q_row_stride + head_M * q_head_stride
    q_MD = tl.load(q_TND + q_at_M[:, None] + d_D[None, :], mask=is_row_M[:, None] & in_head_D[None, :], other=0.0)
    one_L1 = tl.full([BLOCK_L, ONES], 1.0, q_MD.dtype)
    table_P = table_SP + sequence.to(tl.int64) * table_stride
    is_stored_MD = is_row_M[:, None] & in_head_D[None, :]
    out_at_M = ((start + row_M).to(tl.int64) * NUM_HEADS + head_M) * HEAD_DIM
    slot_M = row_M + (start if BY_ROW else sequence * MAX_SPLIT_ROWS)
    partial_M = (slot_M.to(tl.int64) * NUM_HEADS + head_M) * MOST_CHUNKS

    total_shift_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_sum_M1 = tl.zeros([BLOCK_M, ONES], tl.float32)
    total_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for chunk in range(first_chunk, chunks_end, stride):
        chunk_begin = tl.maximum(begin, chunk_start(chunk, CHUNK, GROWS))
        chunk_end = tl.minimum(end, chunk_start(chunk + 1, CHUNK, GROWS))
        shift_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sum_M1 = tl.zeros([BLOCK_M, ONES], tl.float32)
        sum_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for first in range(chunk_begin // BLOCK_L * BLOCK_L, chunk_end, BLOCK_L):
            key_L = first + tl.arange(0, BLOCK_L)
            # Slots outside are never read: they may hold anything, and 0 · NaN is NaN.
            inside_L = (key_L >= chunk_begin) & (key_L < chunk_end)
            page_L = tl.load(table_P + key_L // PAGE_SIZE, mask=inside_L, other=0).to(tl.int64)
            at_L = page_L * page_stride + (key_L % PAGE_SIZE) * slot_stride + kv_head * kv_head_stride
            is_read_DL = inside_L[None, :] & in_head_D[:, None]
            k_DL = tl.load(k_pages + at_L[None, :] + d_D[:, None], mask=is_read_DL, other=0.0)
            if v_scale is not None:
                k_DL = _widened(k_DL, q_MD.dtype)
            score_ML = dot(q_MD, k_DL, tl.zeros([BLOCK_M, BLOCK_L], tl.float32))
            visible_ML = inside_L[None, :] & is_row_M[:, None] & (key_L[None, :] <= position_M[:, None])
            if WINDOW > 0:
                visible_ML = visible_ML & (key_L[None, :] > position_M[:, None] - WINDOW)
            score_ML = tl.where(visible_ML, score_ML, float("-inf"))
            new_shift_M = tl.maximum(shift_M, shift_of(tl.max(score_ML, axis=1), scale_log2, GRID))
            weight_ML = weights_of(score_ML, new_shift_M, scale_log2, GRID).to(q_MD.dtype)
            rescale_M = power_of_two(shift_M - finite(new_shift_M))
            shift_M = new_shift_M
            sum_M1 = dot(weight_ML, one_L1, sum_M1 * rescale_M[:, None])
            is_read_LD = inside_L[:, None] & in_head_D[None, :]
            v_LD = tl.load(v_pages + at_L[:, None] + d_D[None, :], mask=is_read_LD, other=0.0)
            if v_scale is not None:
                v_LD = _widened(v_LD, q_MD.dtype)
            sum_MD = dot(weight_ML, v_LD, sum_MD * rescale_M[:, None])
        new_total_M = tl.maximum(total_shift_M, shift_M)
        of_total_M = power_of_two(total_shift_M - finite(new_total_M))
        of_chunk_M = power_of_two(shift_M - finite(new_total_M))
        if SPLIT:
            if is_direct:
                total_sum_M1 = sum_M1
                total_MD = sum_MD
            else:
                at_M = partial_M + (chunk - base)
                tl.store(partial_o + at_M[:, None] * HEAD_DIM + d_D[None, :], sum_MD, mask=is_stored_MD)
                tl.store(partial_ml + at_M * 2, shift_M, mask=is_row_M)
                tl.store(partial_ml + at_M * 2 + 1, tl.max(sum_M1, axis=1), mask=is_row_M)
        else:
            total_sum_M1 = tl.math.fma(total_sum_M1, of_total_M[:, None], sum_M1 * of_chunk_M[:, None])
            total_MD = tl.math.fma(total_MD, of_total_M[:, None], sum_MD * of_chunk_M[:, None])
            total_shift_M = new_total_M
    if SPLIT:  # noqa: SIM102 -- a constant beside a number
        if not is_direct:
            return
    if v_scale is not None:
        total_MD = total_MD * v_scale
    total_M = tl.max(total_sum_M1, axis=1)  # all columns are the same
    out_MD = tl.div_rn(total_MD, (total_M + tl.where(total_M == 0.0, 1.0, 0.0))[:, None])
    tl.store(out_TND + out_at_M[:, None] + d_D[None, :], out_MD.to(out_TND.dtype.element_ty), mask=is_stored_MD)


@triton.jit(do_not_specialize=["num_seqs"])  # type: ignore[untyped-decorator]
def combine_exact_kernel(  # type: ignore[no-untyped-def]
    out_TND,
    partial_o,
    partial_ml,
    query_start_Z,
    kv_len_S,
    num_seqs,
    v_scale,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
    MAX_SPLIT_ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Add one row's and head's chunks in their order."""
    wait_for_inputs(EARLY)
    slot = tl.program_id(0)
    head = tl.program_id(1)
    sequence, start, row = find_row(slot, query_start_Z, num_seqs, BLOCK_S, MAX_SPLIT_ROWS, BY_ROW)
    num_rows = tl.load(query_start_Z + sequence + 1).to(tl.int32) - start
    if row >= num_rows or num_rows > MAX_SPLIT_ROWS:
        return
    kv_len = tl.load(kv_len_S + sequence).to(tl.int32)
    GROWS: tl.constexpr = WINDOW == 0
    base = chunk_of(tl.maximum(_first_key(kv_len - num_rows, WINDOW), 0), CHUNK, GROWS)
    if chunk_of(tl.maximum(kv_len - 1, 0), CHUNK, GROWS) == base:
        return

    # The chunks that hold keys of this row; the others' partial results may never have been written.
    position = kv_len - num_rows + row
    first = chunk_of(tl.maximum(_first_key(position, WINDOW), 0), CHUNK, GROWS) - base
    last = tl.where(position < 0, first, chunk_of(tl.maximum(position, 0), CHUNK, GROWS) + 1 - base)
    at = (slot.to(tl.int64) * NUM_HEADS + head) * MOST_CHUNKS
    c_C = tl.arange(0, BLOCK_C)
    shift_C = tl.load(partial_ml + (at + c_C) * 2, mask=(c_C >= first) & (c_C < last), other=float("-inf"))
    largest = finite(tl.max(shift_C, axis=0))
    d_D = tl.arange(0, BLOCK_D)
    in_head_D = d_D < HEAD_DIM
    sum_D = tl.zeros([BLOCK_D], tl.float32)
    weight = largest * 0.0
    for some in range(first, last, UNROLLED):
        for c in tl.static_range(UNROLLED):
            chunk = some + c
            is_held = chunk < last
            shift = tl.load(partial_ml + (at + chunk) * 2, mask=is_held, other=float("-inf"))
            chunk_weight = tl.load(partial_ml + (at + chunk) * 2 + 1, mask=is_held, other=0.0)
            is_held_D = in_head_D & (chunk + 0 * d_D < last)
            o_D = tl.load(partial_o + (at + chunk) * HEAD_DIM + d_D, mask=is_held_D, other=0.0)
            scale = power_of_two(shift - largest)
            weight = tl.math.fma(chunk_weight, scale, weight)
            sum_D = tl.math.fma(o_D, scale, sum_D)
    if v_scale is not None:
        sum_D = sum_D * v_scale
    out_D = tl.div_rn(sum_D, tl.zeros([BLOCK_D], tl.float32) + (weight + tl.where(weight == 0.0, 1.0, 0.0)))
    out_at = ((start + row).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_TND + out_at + d_D, out_D.to(out_TND.dtype.element_ty), mask=in_head_D)
