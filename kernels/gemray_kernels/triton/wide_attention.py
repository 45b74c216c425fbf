"""Attention of decode and verify rows with heads of 512, in which nothing but reading takes time (`wide_attend`).

One program a multiprocessor holds two tiles of keys and values, 160 KB, so that memory has always the next one under
way. Measured on an H200: `benchmarks/results/2026-11-30-h200-long-attention`.

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
K KV heads, D head dim, C chunks of a sequence.
"""

from __future__ import annotations

from math import e, log2

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gemray_kernels.attention_scratch import AttentionShape, Split, carved
from gemray_kernels.reference.keys_of_values import KeysOfValues
from gemray_kernels.reference.paged_attention import FEW_ROWS
from gemray_kernels.triton.early_start import on_hopper, starts_early
from gemray_kernels.triton.gluon_ring import swizzled
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS
from gemray_kernels.triton.wide_attend import BLOCK_D, HEAD_DIM, PAGE, WideShape, wide_attend_kernel
from gemray_kernels.triton.wide_spans import MOST_SEQUENCES, combine_chunks_kernel

LOG2_E = log2(e)
MOST_PAIRS = 64
"""(row, query head) pairs of a program, half of them where keys are read whole; sequences of more take several."""
BLOCKS = HEAD_DIM // BLOCK_D
TILES = 16
"""Tiles of keys of a chunk, usually: with few pairs, partial results are then a hundredth of what is read."""
ATTEND_REGISTERS = 216
FETCH_REGISTERS = 56


def is_wide(
    q_TND: Tensor,
    k_pages: Tensor,
    num_seqs: int,
    *,
    window: int | None,
    causal: bool,
    most_rows: int,
    keys_of_values: KeysOfValues | None,
) -> bool:
    """Whether `attend_wide` takes such a call: few rows of each sequence, in pages the accelerator addresses.

    Where keys are read whole, rows of more than 32 pairs leave no room for a second tile of them: they gain at long
    contexts alone.
    """
    num_rows, num_heads, head_dim = q_TND.shape
    _, page_size, num_kv_heads, _ = k_pages.shape
    group = num_heads // num_kv_heads
    return (
        head_dim == HEAD_DIM
        and window is None
        and causal
        and most_rows <= FEW_ROWS
        and num_rows <= num_seqs * FEW_ROWS
        and num_seqs <= MOST_SEQUENCES
        and q_TND.dtype == k_pages.dtype == torch.bfloat16
        and group in (1, 2, 4, 8, 16, 32)
        and (has_values(keys_of_values) or most_rows * group <= MOST_PAIRS // 2)
        and page_size == PAGE
        and k_pages.is_contiguous()
        and on_hopper(q_TND)
    )


def attend_wide(
    q_TND: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table_SP: Tensor,
    query_start_Z: Tensor,
    kv_len_S: Tensor,
    out_TND: Tensor,
    *,
    scale: float,
    most_rows: int,
    keys_of_values: KeysOfValues | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Attend causally with all rows.

    Args:
        q_TND: as all tensors before `out_TND`, of `paged_attention`, as `is_wide` says.
        out_TND: takes the result.
        scale: multiplies the scores.
        most_rows: of a sequence that sees keys.
        keys_of_values: where given, keys are read in the blocks of dims that rotate, and values for the others.
        scratch: uint8 memory for partial results; a call takes memory of its own where it is None or too small.
    """
    num_rows, num_heads, _ = q_TND.shape
    num_pages, page_size, num_kv_heads, _ = k_pages.shape
    num_seqs = len(kv_len_S)
    early = starts_early(q_TND)
    table_keys = block_table_SP.shape[1] * page_size
    split = Split.of(AttentionShape(num_heads, num_kv_heads, HEAD_DIM, None, table_keys), num_rows, num_seqs)
    shape = shape_of(
        num_heads,
        num_kv_heads,
        most_rows,
        most_chunks=split.grid_chunks,
        values=has_values(keys_of_values),
        early=early,
    )
    cut = (fewest_chunks(num_seqs, most_rows, shape), usual_tiles(shape))
    partial_o, partial_ml = carved(
        scratch,
        q_TND.device,
        ((num_rows, num_heads, shape.most_chunks, HEAD_DIM), torch.float32),
        ((num_rows, num_heads, shape.most_chunks, 2), torch.float32),
    )
    layout = swizzled(2 * BLOCK_D, rank=3)
    k_slots, v_slots = (
        TensorDescriptor.from_tensor(
            pages.view(num_pages, page_size, num_kv_heads * HEAD_DIM), [1, PAGE, BLOCK_D], layout
        )
        for pages in (k_pages, v_pages)
    )
    wide_attend_kernel[(MULTIPROCESSORS,)](
        q_TND,
        k_slots,
        v_slots,
        q_TND if keys_of_values is None else keys_of_values.weight_D,
        block_table_SP,
        query_start_Z,
        kv_len_S,
        partial_o,
        partial_ml,
        num_seqs,
        *cut,
        scale * LOG2_E,
        q_TND.stride(0),
        q_TND.stride(1),
        block_table_SP.stride(0),
        SHAPE=shape,
        ATTEND_REGISTERS=ATTEND_REGISTERS,
        FETCH_REGISTERS=FETCH_REGISTERS,
        num_warps=4,
        launch_pdl=early,
    )
    combine_chunks_kernel[(num_rows, num_heads)](
        out_TND,
        partial_o,
        partial_ml,
        query_start_Z,
        kv_len_S,
        num_seqs,
        *cut,
        MOST_CHUNKS=shape.most_chunks,
        NUM_HEADS=num_heads,
        HEAD_DIM=HEAD_DIM,
        BLOCK_S=MOST_SEQUENCES,
        BLOCK_C=triton.next_power_of_2(shape.most_chunks),
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )


def has_values(keys_of_values: KeysOfValues | None) -> bool:
    """Whether values stand for keys in all but the first 64 dims of each half."""
    return keys_of_values is not None and keys_of_values.num_rotating <= BLOCK_D


def shape_of(
    num_heads: int,
    num_kv_heads: int,
    most_rows: int,
    *,
    most_chunks: int,
    values: bool,
    early: bool,
) -> WideShape:
    """Choose what a program holds: pairs for all rows of a sequence, as far as there is room beside the tiles.

    With one tile of keys, the next one is fetched once products with it end: 183 us instead of 118 for 31B's five rows
    of eight sequences of 8,192 keys. The room that weights would take makes a second one possible.
    """
    most_pairs = MOST_PAIRS if values else MOST_PAIRS // 2
    pairs = min(max(8, triton.next_power_of_2(most_rows * (num_heads // num_kv_heads))), most_pairs)
    groups = 2 if pairs == MOST_PAIRS else 1
    return WideShape(
        pairs=pairs // groups,
        groups=groups,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        most_chunks=most_chunks,
        key_blocks=2 if values else BLOCKS,
        k_stages=2,
        v_stages=2 if values else 1,
        weights_in_keys=pairs == most_pairs,
        early=early,
    )


def fewest_chunks(num_seqs: int, most_rows: int, shape: WideShape) -> int:
    """Chunks of a sequence, at least: so many that one for each multiprocessor comes of all sequences together.

    The last sequence is counted for the null slot, where there are several: of drafts it is none.
    """
    blocks = -(-most_rows // shape.rows)
    chunks = MULTIPROCESSORS // (max(1, num_seqs - 1) * blocks * shape.num_kv_heads)
    return max(1, min(chunks, shape.most_chunks))


def usual_tiles(shape: WideShape) -> int:
    """Tiles of a chunk beyond the fewest chunks: twice as many where partial results are large."""
    return TILES * shape.groups
