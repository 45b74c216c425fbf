"""Which keys of which sequence the programs of `triton.wide_attention` take, and how their partial softmaxes combine.

A sequence's keys are cut into chunks of whole tiles, by its own length and by what the host knows of a step's shape.
Every chunk, KV head and block of rows is an item; programs take all items in turn, so that none idles where lengths
differ, and what is fetched for the next item comes while the one before is computed.

Shape legend: S sequences, Z = S + 1 bounds, T rows of all sequences together, N query heads, D head dim, C chunks of a
sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemray_kernels.triton.attend_spans import combined
from gemray_kernels.triton.early_start import load_older, wait_for_inputs

TILE = tl.constexpr(64)
"""Keys of a tile."""
MOST_SEQUENCES = 128
"""Sequences of a call, the null slot among them: programs are the same for all of them."""


@triton.jit
def chunk_tiles_of(num_tiles, cut):  # type: ignore[no-untyped-def]
    """Tiles of a chunk of a sequence of so many tiles.

    A sequence has `fewest_chunks`, more where a chunk had more than `usual_tiles`, and never more than `most_chunks`:
    so one long sequence among short ones is shared by many programs.
    """
    fewest_chunks, usual_tiles, most_chunks = cut
    size = tl.minimum((num_tiles + fewest_chunks - 1) // fewest_chunks, usual_tiles)
    return tl.maximum(tl.maximum(size, (num_tiles + most_chunks - 1) // most_chunks), 1)


@triton.jit
def _add(a, b):  # type: ignore[no-untyped-def]
    return a + b


@triton.jit  # type: ignore[untyped-decorator]
def items_of(s_S, sequences, cut, BLOCK_ROWS: tl.constexpr, KV_HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """By sequence: first row, rows, keys, first item and the one behind the last; and how many items there are.

    Args:
        s_S: 0 to more than the number of sequences.
        sequences: first rows [S + 1], keys [S], and how many there are.
        cut: fewest chunks, usual tiles and most chunks.
        BLOCK_ROWS: rows of an item.
        KV_HEADS: of the layer.
    """
    query_start_Z, kv_len_S, num_seqs = sequences
    is_there_S = s_S < num_seqs
    start_S = load_older(query_start_Z + s_S, mask=is_there_S, other=0).to(tl.int32)
    rows_S = load_older(query_start_Z + s_S + 1, mask=is_there_S, other=0).to(tl.int32) - start_S
    keys_S = load_older(kv_len_S + s_S, mask=is_there_S, other=0).to(tl.int32)
    tiles_S = (keys_S + TILE - 1) // TILE
    size_S = chunk_tiles_of(tiles_S, cut)
    items_S = (tiles_S + size_S - 1) // size_S * ((rows_S + BLOCK_ROWS - 1) // BLOCK_ROWS) * KV_HEADS
    end_S = tl.associative_scan(items_S, 0, _add)
    return (start_S, rows_S, keys_S, end_S - items_S, end_S), tl.sum(items_S, 0)


@triton.jit  # type: ignore[untyped-decorator]
def item_of(item, items, cut, BLOCK_ROWS: tl.constexpr, KV_HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sequence, its first row among all, its rows and keys; the item's first row in it, KV head and chunk; the chunk's
    first key and its end."""
    start_S, rows_S, keys_S, first_S, end_S = items
    sequence = tl.sum((end_S <= item).to(tl.int32), 0)
    is_it_S = (first_S <= item) & (end_S > item)
    start = tl.sum(tl.where(is_it_S, start_S, 0), 0)
    num_rows = tl.sum(tl.where(is_it_S, rows_S, 0), 0)
    num_keys = tl.sum(tl.where(is_it_S, keys_S, 0), 0)
    item -= tl.sum(tl.where(is_it_S, first_S, 0), 0)
    # Blocks of rows that read the same keys run at the same time.
    blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    first_row = item % blocks * BLOCK_ROWS
    item = item // blocks
    chunk = item // KV_HEADS
    size = chunk_tiles_of((num_keys + TILE - 1) // TILE, cut) * TILE
    end = tl.minimum((chunk + 1) * size, num_keys)
    return (sequence, start, num_rows, num_keys), (first_row, item % KV_HEADS, chunk), (chunk * size, end)


@triton.jit(do_not_specialize=["num_seqs", "fewest_chunks", "usual_tiles"])  # type: ignore[untyped-decorator]
def combine_chunks_kernel(  # type: ignore[no-untyped-def]
    out_TND,
    partial_o,
    partial_ml,
    query_start_Z,
    kv_len_S,
    num_seqs,
    fewest_chunks,
    usual_tiles,
    MOST_CHUNKS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Combine one row's and head's partial softmaxes; zeros for rows that see no key."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    # What says whose rows these are is older than all that runs, and may be read.
    s_S = tl.arange(0, BLOCK_S)
    end_S = load_older(query_start_Z + 1 + s_S, mask=s_S < num_seqs, other=2147483647).to(tl.int32)
    sequence = tl.sum((end_S <= row).to(tl.int32))
    num_tiles = (load_older(kv_len_S + sequence, mask=sequence < num_seqs, other=0).to(tl.int32) + TILE - 1) // TILE
    wait_for_inputs(EARLY)
    size = chunk_tiles_of(num_tiles, (fewest_chunks, usual_tiles, MOST_CHUNKS))
    c_C = tl.arange(0, BLOCK_C)
    is_there_C = c_C < (num_tiles + size - 1) // size
    d_D = tl.arange(0, HEAD_DIM)
    pair = row.to(tl.int64) * NUM_HEADS + head
    partial_C = pair * MOST_CHUNKS + c_C
    # All loads come before the sums, whose steps wait for each other.
    largest_C = tl.load(partial_ml + partial_C * 2, mask=is_there_C, other=float("-inf"))
    sum_C = tl.load(partial_ml + partial_C * 2 + 1, mask=is_there_C, other=0.0)
    o_CD = tl.load(partial_o + partial_C[:, None] * HEAD_DIM + d_D[None, :], mask=is_there_C[:, None], other=0.0)
    o_D = combined(largest_C, sum_C, o_CD)
    tl.store(out_TND + pair * HEAD_DIM + d_D, o_D.to(out_TND.dtype.element_ty))
