"""Attention of prompt chunks in two kernels: one for the weights of keys, one for their products with the values.

Rows of wide heads leave no registers for both products in one kernel: blocks would be of few rows, and all keys and
values be read again for every few. Apart, both are plain matrix products of large tiles, beside which the weights
between them are little to write and read: 2 bytes for 2 · D multiplications.

Keys are taken in **rounds** of as many tiles as there is memory for weights; a round goes on where the one before
stopped. Where CHUNK is not 0, sums are cut at the chunks of `exact_softmax`, whose smallest has so many keys.

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
D head dim, B blocks of rows, K KV heads (also columns of D that are multiplied at a time), X tiles of keys in a round,
M = (row, query head) pairs of one block, L keys of one tile, E columns of one program's values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemray_kernels.triton.attend_spans import find_rows
from gemray_kernels.triton.dot import dot
from gemray_kernels.triton.early_start import wait_for_inputs
from gemray_kernels.triton.exact_softmax import (
    ONES,
    chunk_of,
    finite,
    power_of_two,
    shift_of,
    weights_of,
)


@triton.jit  # type: ignore[untyped-decorator]
def _keys_of_block(  # type: ignore[no-untyped-def]
    first_row,
    num_rows,
    kv_len,
    first_tile,
    num_tiles,
    WINDOW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Keys [begin, end) that some row of a block sees, the tiles [first, last) of this round, the round's first tile.

    With a window the one round begins at the block's first key.
    """
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(kv_len - num_rows + first_row - WINDOW + 1, 0)
        first_tile = begin // BLOCK_L
    end = tl.maximum(kv_len - num_rows + tl.minimum(first_row + BLOCK_ROWS, num_rows), 0)
    first = tl.maximum(begin // BLOCK_L, first_tile)
    last = tl.minimum((end + BLOCK_L - 1) // BLOCK_L, first_tile + num_tiles)
    return begin, end, first, last, first_tile


@triton.jit  # type: ignore[untyped-decorator]
def _ends_chunk(tile, end, BLOCK_L: tl.constexpr, CHUNK: tl.constexpr, GROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether the sums of a tile's chunk are complete for rows that see keys up to `end`."""
    following = (tile + 1) * BLOCK_L
    ends = following >= end
    if CHUNK > 0:
        ends = ends | (chunk_of(following, CHUNK, GROWS) != chunk_of(tile * BLOCK_L, CHUNK, GROWS))
    return ends


@triton.jit(do_not_specialize=["num_seqs", "first_tile", "num_tiles"])  # type: ignore[untyped-decorator]
def attend_weights_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    q_TND,
    k_pages,
    table_SP,
    query_start_Z,
    kv_len_S,
    weights_BKXML,
    scales_BKX2M,
    totals_BK3M,
    num_seqs,
    first_tile,
    num_tiles,
    scale_log2,
    q_row_stride,
    q_head_stride,
    page_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GRID: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Weights of a round's keys for one block of rows, and what each tile does to the sums.

    Of a tile: the power of two by which sums of the chunk so far are scaled; where its chunk is complete, that of the
    total so far and that of the chunk. `totals_BK3M` are the largest shift and the sum of all weights.
    """
    wait_for_inputs(EARLY)
    # The last blocks of a prompt see the most keys, so they begin first and the short ones fill the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence, start, first_row = find_rows(block, query_start_Z, num_seqs, BLOCK_S, BLOCK_ROWS)
    num_rows = tl.load(query_start_Z + sequence + 1).to(tl.int32) - start
    kv_len = tl.load(kv_len_S + sequence).to(tl.int32)
    if first_row >= num_rows or num_rows <= FEW_ROWS:
        return
    begin, end, first, last, first_tile = _keys_of_block(
        first_row, num_rows, kv_len, first_tile, num_tiles, WINDOW, BLOCK_ROWS, BLOCK_L
    )
    if first >= last:
        return

    pair_M = tl.arange(0, BLOCK_M)
    row_M = first_row + pair_M // GROUP
    head_M = kv_head * GROUP + pair_M % GROUP
    is_row_M = (pair_M < BLOCK_ROWS * GROUP) & (row_M < num_rows)
    position_M = tl.where(is_row_M, kv_len - num_rows + row_M, -1)
    first_position = kv_len - num_rows + first_row
    last_position = end - 1

    l_L = tl.arange(0, BLOCK_L)
    d_K = tl.arange(0, BLOCK_K)
    one_L1 = tl.full([BLOCK_L, ONES], 1.0, weights_BKXML.dtype.element_ty)
    q_at_M = tl.where(is_row_M, (start + row_M).to(tl.int64) * q_row_stride + head_M * q_head_stride, 0)
    q_MK = q_TND + q_at_M[:, None] + d_K[None, :]
    table_P = table_SP + sequence.to(tl.int64) * table_stride
    k_pages += kv_head * kv_head_stride
    at = block.to(tl.int64) * tl.num_programs(1) + kv_head
    weights_ML = weights_BKXML + at * num_tiles * BLOCK_M * BLOCK_L + pair_M[:, None] * BLOCK_L + l_L[None, :]
    scale_M = scales_BKX2M + at * num_tiles * 2 * BLOCK_M + pair_M
    total_M = totals_BK3M + at * 3 * BLOCK_M + pair_M

    shift_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M1 = tl.zeros([BLOCK_M, ONES], tl.float32)
    total_shift_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_sum_M1 = tl.zeros([BLOCK_M, ONES], tl.float32)
    if first > begin // BLOCK_L:  # a round before this one
        total_shift_M = tl.load(total_M)
        total_sum_M1 += tl.load(total_M + BLOCK_M)[:, None]
    tl.store(total_M + 2 * BLOCK_M, total_shift_M)
    page_L = tl.load(table_P + (first * BLOCK_L + l_L) // PAGE_SIZE, mask=first * BLOCK_L + l_L < end, other=0)
    for tile in range(first, last):
        key_L = tile * BLOCK_L + l_L
        # Slots outside are never read: they may hold anything, and 0 · NaN is NaN.
        inside_L = (key_L >= begin) & (key_L < end)
        k_at_L = page_L.to(tl.int64) * page_stride + (key_L % PAGE_SIZE) * slot_stride
        page_L = tl.load(table_P + (key_L + BLOCK_L) // PAGE_SIZE, mask=key_L + BLOCK_L < end, other=0)
        k_LK = k_pages + k_at_L[:, None] + d_K[None, :]
        score_ML = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
        for d in range(0, HEAD_DIM, BLOCK_K):
            if HEAD_DIM % BLOCK_K == 0:
                q = tl.load(q_MK + d)
                k = tl.load(k_LK + d, mask=inside_L[:, None], other=0.0)
            else:
                in_head_K = d_K + d < HEAD_DIM
                q = tl.load(q_MK + d, mask=in_head_K[None, :], other=0.0)
                k = tl.load(k_LK + d, mask=inside_L[:, None] & in_head_K[None, :], other=0.0)
            score_ML = dot(q, tl.trans(k).to(q.dtype), score_ML)  # 8-bit floats are widened
        hides = (tile + 1) * BLOCK_L > first_position + 1
        if WINDOW > 0:
            hides = hides | (tile * BLOCK_L <= last_position - WINDOW)
        if hides:
            visible_ML = inside_L[None, :] & (key_L[None, :] <= position_M[:, None])
            if WINDOW > 0:
                visible_ML = visible_ML & (key_L[None, :] > position_M[:, None] - WINDOW)
            score_ML = tl.where(visible_ML, score_ML, float("-inf"))
        new_shift_M = tl.maximum(shift_M, shift_of(tl.max(score_ML, axis=1), scale_log2, GRID))
        weight_ML = weights_of(score_ML, new_shift_M, scale_log2, GRID).to(weights_BKXML.dtype.element_ty)
        tl.store(weights_ML + (tile - first_tile).to(tl.int64) * (BLOCK_M * BLOCK_L), weight_ML)
        rescale_M = power_of_two(shift_M - finite(new_shift_M))
        scale_at_M = scale_M + (tile - first_tile) * 2 * BLOCK_M
        tl.store(scale_at_M, rescale_M)
        tl.store(scale_at_M + BLOCK_M, new_shift_M)
        sum_M1 = dot(weight_ML, one_L1, sum_M1 * rescale_M[:, None])
        shift_M = new_shift_M
        if _ends_chunk(tile, end, BLOCK_L, CHUNK, WINDOW == 0) | (tile + 1 == last):
            new_total_M = tl.maximum(total_shift_M, shift_M)
            of_total_M = power_of_two(total_shift_M - finite(new_total_M))
            of_chunk_M = power_of_two(shift_M - finite(new_total_M))
            total_sum_M1 = tl.math.fma(total_sum_M1, of_total_M[:, None], sum_M1 * of_chunk_M[:, None])
            total_shift_M = new_total_M
            shift_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
            sum_M1 = tl.zeros([BLOCK_M, ONES], tl.float32)
    tl.store(total_M, total_shift_M)
    tl.store(total_M + BLOCK_M, tl.max(total_sum_M1, axis=1))  # all columns are the same


@triton.jit(do_not_specialize=["num_seqs", "first_tile", "num_tiles"])  # type: ignore[untyped-decorator]
def attend_values_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0912, PLR0915
    v_pages,
    table_SP,
    query_start_Z,
    kv_len_S,
    weights_BKXML,
    scales_BKX2M,
    totals_BK3M,
    carried_TND,
    out_TND,
    num_seqs,
    first_tile,
    num_tiles,
    page_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    v_scale,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add up the values of a round's keys for one block of rows, or a part of its pairs, and some columns.

    What a later round goes on with is in `carried_TND`, the result of the last round in `out_TND`.
    """
    wait_for_inputs(EARLY)
    columns = tl.cdiv(HEAD_DIM, BLOCK_E)
    block = tl.num_programs(0) // (PARTS * columns) - 1 - tl.program_id(0) // (PARTS * columns)
    part = tl.program_id(0) // columns % PARTS
    kv_head = tl.program_id(1)
    sequence, start, first_row = find_rows(block, query_start_Z, num_seqs, BLOCK_S, BLOCK_ROWS)
    num_rows = tl.load(query_start_Z + sequence + 1).to(tl.int32) - start
    kv_len = tl.load(kv_len_S + sequence).to(tl.int32)
    if first_row >= num_rows or num_rows <= FEW_ROWS:
        return
    begin, end, first, last, first_tile = _keys_of_block(
        first_row, num_rows, kv_len, first_tile, num_tiles, WINDOW, BLOCK_ROWS, TILE_KEYS
    )
    if first >= last:
        return

    pair_M = part * BLOCK_M + tl.arange(0, BLOCK_M)
    row_M = first_row + pair_M // GROUP
    head_M = kv_head * GROUP + pair_M % GROUP
    is_row_M = (pair_M < BLOCK_ROWS * GROUP) & (row_M < num_rows)
    l_L = tl.arange(0, BLOCK_L)
    e_E = tl.program_id(0) % columns * BLOCK_E + tl.arange(0, BLOCK_E)
    in_head_E = e_E < HEAD_DIM
    table_P = table_SP + sequence.to(tl.int64) * table_stride
    v_pages += kv_head * kv_head_stride
    at = (block.to(tl.int64) * tl.num_programs(1) + kv_head) * PARTS
    weights_ML = weights_BKXML + at * num_tiles * (BLOCK_M * TILE_KEYS) + pair_M[:, None] * TILE_KEYS + l_L[None, :]
    scale_M = scales_BKX2M + at * num_tiles * (2 * BLOCK_M) + pair_M
    out_at_M = ((start + row_M).to(tl.int64) * NUM_HEADS + head_M) * HEAD_DIM
    is_stored_ME = is_row_M[:, None] & in_head_E[None, :]

    STEPS: tl.constexpr = TILE_KEYS // BLOCK_L
    total_M = totals_BK3M + at * (3 * BLOCK_M) + pair_M
    total_shift_M = finite(tl.load(total_M))
    sum_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if CHUNK > 0:
        total_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        if first > begin // TILE_KEYS:
            carried_ME = tl.load(carried_TND + out_at_M[:, None] + e_E[None, :], mask=is_stored_ME, other=0.0)
            of_carried_M = power_of_two(tl.load(total_M + 2 * PARTS * BLOCK_M) - total_shift_M)
            total_ME = carried_ME.to(tl.float32) * of_carried_M[:, None]
    rescale_M = tl.load(scale_M + (first - first_tile) * (2 * PARTS * BLOCK_M))
    for step in range(first * STEPS, last * STEPS):
        tile = step // STEPS
        key_L = step * BLOCK_L + l_L
        inside_L = (key_L >= begin) & (key_L < end)
        page_L = tl.load(table_P + key_L // PAGE_SIZE, mask=inside_L, other=0)
        v_at_L = page_L.to(tl.int64) * page_stride + (key_L % PAGE_SIZE) * slot_stride
        weight_ML = tl.load(
            weights_ML + (tile - first_tile).to(tl.int64) * (PARTS * BLOCK_M * TILE_KEYS) + step % STEPS * BLOCK_L
        )
        if HEAD_DIM % BLOCK_E == 0:
            v_LE = tl.load(v_pages + v_at_L[:, None] + e_E[None, :], mask=inside_L[:, None], other=0.0)
        else:
            is_read_LE = inside_L[:, None] & in_head_E[None, :]
            v_LE = tl.load(v_pages + v_at_L[:, None] + e_E[None, :], mask=is_read_LE, other=0.0)
        if CHUNK > 0:  # loaded before the product, to be here behind it
            shift_M = tl.load(scale_M + (tile - first_tile) * (2 * PARTS * BLOCK_M) + PARTS * BLOCK_M)
        sum_ME = dot(weight_ML, v_LE.to(weight_ML.dtype), sum_ME * rescale_M[:, None])
        # Within a tile, nothing is scaled; the next tile's factor is loaded a step ahead.
        following = tl.minimum(step + 1, last * STEPS - 1)
        rescale_M = tl.load(scale_M + (following // STEPS - first_tile) * (2 * PARTS * BLOCK_M))
        if STEPS > 1:
            rescale_M = tl.where(following % STEPS == 0, rescale_M, 1.0)
        if CHUNK > 0:
            ends = _ends_chunk(tile, end, TILE_KEYS, CHUNK, WINDOW == 0) | (tile + 1 == last)
            if ends & (step % STEPS == STEPS - 1):
                total_ME = tl.math.fma(sum_ME, power_of_two(shift_M - total_shift_M)[:, None], total_ME)
    if CHUNK == 0:
        shift_M = tl.load(scale_M + (last - 1 - first_tile) * (2 * PARTS * BLOCK_M) + PARTS * BLOCK_M)
        total_ME = sum_ME * power_of_two(shift_M - total_shift_M)[:, None]
        if first > begin // TILE_KEYS:
            carried_ME = tl.load(carried_TND + out_at_M[:, None] + e_E[None, :], mask=is_stored_ME, other=0.0)
            of_carried_M = power_of_two(tl.load(total_M + 2 * PARTS * BLOCK_M) - total_shift_M)
            total_ME = tl.math.fma(carried_ME.to(tl.float32), of_carried_M[:, None], total_ME)

    if last * TILE_KEYS < end:
        tl.store(
            carried_TND + out_at_M[:, None] + e_E[None, :], total_ME.to(carried_TND.dtype.element_ty), mask=is_stored_ME
        )
    else:
        if v_scale is not None:
            total_ME = total_ME * v_scale
        weight_M = tl.load(total_M + PARTS * BLOCK_M)
        out_ME = tl.div_rn(total_ME, (weight_M + tl.where(weight_M == 0.0, 1.0, 0.0))[:, None])
        tl.store(out_TND + out_at_M[:, None] + e_E[None, :], out_ME.to(out_TND.dtype.element_ty), mask=is_stored_ME)
