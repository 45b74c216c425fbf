"""Whose rows and which keys a program of attention over few rows has.

Shape legend: Z = S + 1 bounds of S sequences, P block-table columns, L keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemray_kernels.triton.early_start import load_older

MANY_ROWS = tl.constexpr(8)
CHUNK_OF_MANY_ROWS = tl.constexpr(128)
"""Keys of a chunk, at least, of a sequence of more rows: a block of drafts keeps the device at work with few chunks."""


@triton.jit  # type: ignore[untyped-decorator]
def chunk_keys_of(  # type: ignore[no-untyped-def]
    num_rows, kv_len, WINDOW: tl.constexpr, GROUP: tl.constexpr, MOST_CHUNKS: tl.constexpr, MIN_CHUNK: tl.constexpr
):
    """Keys of a chunk of this sequence; its first chunk holds the first key that any of its rows sees.

    At least 2 for each (row, head) pair, and CHUNK_OF_MANY_ROWS of many rows, so that partial results stay fewer bytes
    than keys; at least so many that MOST_CHUNKS - 1 of them cover the keys, which may begin and end inside a chunk.
    """
    span = kv_len
    if WINDOW > 0:
        span = tl.minimum(kv_len, WINDOW + num_rows)
    for_rows = (2 * num_rows * GROUP + MIN_CHUNK - 1) // MIN_CHUNK
    if num_rows > MANY_ROWS:
        for_rows = tl.maximum(for_rows, CHUNK_OF_MANY_ROWS // MIN_CHUNK)
    for_span = (span + MIN_CHUNK * (MOST_CHUNKS - 1) - 1) // (MIN_CHUNK * (MOST_CHUNKS - 1))
    return tl.maximum(tl.maximum(for_rows, for_span), 1) * MIN_CHUNK


@triton.jit
def combined(largest_C, sum_C, o_CD):  # type: ignore[no-untyped-def]
    """A row's result [D] of its chunks' largest scores, sums of weights and weighted sums; zeros without a key."""
    largest = tl.max(largest_C, axis=0)
    weight_C = tl.exp2(largest_C - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weight_C * sum_C, axis=0)
    return tl.sum(o_CD * weight_C[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)


@triton.jit  # type: ignore[untyped-decorator]
def first_key(position, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key that a query at `position` sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    return first


@triton.jit  # type: ignore[untyped-decorator]
def find_rows(block, query_start_Z, num_seqs, BLOCK_S: tl.constexpr, BLOCK_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whose rows a block of a grid over all rows has: sequence, its first row among all, the block's first row in it.

    Sequence s has the blocks from ``start[s] // BLOCK_ROWS + s`` on: as many as it needs, or one more.
    """
    s_S = tl.arange(0, BLOCK_S)
    start_S = load_older(query_start_Z + s_S, mask=s_S < num_seqs, other=0).to(tl.int32)
    begins_before = (start_S // BLOCK_ROWS + s_S <= block) & (s_S < num_seqs)
    sequence = tl.sum(begins_before.to(tl.int32)) - 1
    start = load_older(query_start_Z + sequence).to(tl.int32)
    return sequence, start, (block - start // BLOCK_ROWS - sequence) * BLOCK_ROWS


@triton.jit  # type: ignore[untyped-decorator]
def find_row(  # type: ignore[no-untyped-def]
    slot, query_start_Z, num_seqs, BLOCK_S: tl.constexpr, MAX_SPLIT_ROWS: tl.constexpr, BY_ROW: tl.constexpr
):
    """Whose row has a slot of partial results: sequence, its first row among all, the row's place in it.

    Slots are rows, or MAX_SPLIT_ROWS for each sequence.
    """
    if BY_ROW:
        s_S = tl.arange(0, BLOCK_S)
        end_S = load_older(query_start_Z + 1 + s_S, mask=s_S < num_seqs, other=2147483647).to(tl.int32)
        sequence = tl.sum((end_S <= slot).to(tl.int32))
        start = load_older(query_start_Z + sequence).to(tl.int32)
        row = slot - start
    else:
        sequence = slot // MAX_SPLIT_ROWS
        start = load_older(query_start_Z + sequence).to(tl.int32)
        row = slot % MAX_SPLIT_ROWS
    return sequence, start, row


@triton.jit
def ends_at_once(is_idle):  # type: ignore[no-untyped-def]
    """Whether a program that has nothing to do ends before the kernel before it has, and makes room.

    The first one does not: by it the next kernel, which waits for this one, waits for the one before.
    """
    return is_idle & (tl.program_id(0) + tl.program_id(1) + tl.program_id(2) > 0)


@triton.jit  # type: ignore[untyped-decorator]
def find_span(  # type: ignore[no-untyped-def]
    query_start_Z,
    kv_len_S,
    num_seqs,
    blocks_per_seq,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    MAX_SPLIT_ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Whose rows and keys a program has: sequence, its first row among all, the block's first row in it, its rows, its
    keys; the first and the end of the keys of this chunk that some row of the block sees; whether the chunk is the only
    one; whether the program has nothing to do."""
    block = tl.program_id(0)
    if SEARCH:
        sequence, start, first_row = find_rows(block, query_start_Z, num_seqs, BLOCK_S, BLOCK_ROWS)
    else:
        sequence = block // blocks_per_seq
        start = load_older(query_start_Z + sequence).to(tl.int32)
        first_row = (block % blocks_per_seq) * BLOCK_ROWS
    num_rows = load_older(query_start_Z + sequence + 1).to(tl.int32) - start
    kv_len = load_older(kv_len_S + sequence).to(tl.int32)
    # Rows that see no key, padding among them, are few rows however many there are: they get their zeros there.
    is_idle = (first_row >= num_rows) | ((num_rows > MAX_SPLIT_ROWS) & (kv_len > 0))
    begin = first_key(kv_len - num_rows + first_row, WINDOW)
    end = kv_len
    if CAUSAL:
        end = kv_len - num_rows + tl.minimum(first_row + BLOCK_ROWS, num_rows)
    chunk = tl.program_id(2)
    chunk_keys = chunk_keys_of(num_rows, kv_len, WINDOW, GROUP, MOST_CHUNKS, MIN_CHUNK)
    first_chunk = first_key(kv_len - num_rows, WINDOW) // chunk_keys
    is_direct = (kv_len - 1) // chunk_keys - first_chunk < 1
    if is_direct:
        is_idle |= chunk > 0
    else:
        begin = tl.maximum(begin, (first_chunk + chunk) * chunk_keys)
        end = tl.minimum(end, (first_chunk + chunk + 1) * chunk_keys)
        is_idle |= begin >= end
    return sequence, start, first_row, num_rows, kv_len, begin, end, is_direct, is_idle
