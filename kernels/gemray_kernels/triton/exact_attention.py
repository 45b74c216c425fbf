"""`exact_paged_attention` in Triton: a row's bits follow from its query, keys and position alone (`exact_softmax`).

Sequences of few rows (decode and verify steps) are attended by `attend_exact_kernel`, their chunks in programs of their
own where there is memory for partial sums; long ones, in 16 bits, by the two kernels of `attend_in_two`. All of them
add in the same order.

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
D head dim, R rows that may be split, C chunks of a sequence.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gemray_kernels.attention_scratch import PROGRAMS_PER_ROW_BLOCK, carved
from gemray_kernels.fp8_kv import FP8, check_scales
from gemray_kernels.layout import require_contiguous, require_rows
from gemray_kernels.reference.keys_of_values import KeysOfValues
from gemray_kernels.reference.paged_attention import FEW_ROWS
from gemray_kernels.triton.early_start import starts_early
from gemray_kernels.triton.exact_attend_kernels import attend_exact_kernel, combine_exact_kernel
from gemray_kernels.triton.exact_softmax import num_chunks, smallest_chunk
from gemray_kernels.triton.paged_attention import (
    LEAST_BLOCK_OF_SEQUENCES,
    LOG2_E,
    Tile,
    check_tensors,
    short_tile,
)
from gemray_kernels.triton.prompt_attention import PromptTiles, attend_prompts

MOST_PROGRAMS = 32
"""Programs of a block of rows and a KV head; a long sequence's chunks are dealt to them in turn."""
PARTIAL_BYTES = 1 << 29
"""Partial sums of a call; of rows that need more, a block's chunks are one program's."""
GRID = 1.5 * 2**13
"""Added to scores it leaves them multiples of 2^-10."""


def exact_paged_attention(
    q_TND: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table_SP: Tensor,
    query_start_Z: Tensor,
    kv_len_S: Tensor,
    *,
    window: int | None,
    causal: bool,
    scale: float,
    most_rows: int | None = None,
    most_keys: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    keys_of_values: KeysOfValues | None = None,
    reader_comes_ahead: bool = False,
    scratch: Tensor | None = None,
    tile: Tile | None = None,
    prompt_tiles: PromptTiles | None = None,
    partial_bytes: int = PARTIAL_BYTES,
) -> Tensor:
    """Softmax attention [T, N, D]; arguments and masks as of `gemray_kernels.reference.paged_attention`.

    A row's result has the same bits whatever rows and sequences are beside it, however its sequence's rows are cut into
    calls, wherever its pages lie, and whichever heads are of this rank. In bfloat16, scores are rounded to multiples of
    2^-10 (in powers of two). float32 is for comparisons: prompts are attended as decode steps are.

    Args:
        scratch: as of `gemray_kernels.triton.paged_attention`, for partial sums alone: a captured prompt has rounds for
            all keys that its sequence may have, fewer where it has memory of its own.
        tile: of few rows; chosen when None.
        prompt_tiles: of many; chosen when None.
        partial_bytes: of partial sums, at most. The others are the reference's.

    Raises:
        ValueError: `causal` is False, or tensors do not fit.
    """
    if not causal:
        raise ValueError("causal is False; only causal attention is exact")
    num_rows, num_heads, head_dim = q_TND.shape
    num_seqs, num_kv_heads, page_size = len(kv_len_S), k_pages.shape[2], k_pages.shape[1]
    out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
    if num_rows == 0:
        return out_TND
    check_tensors(q_TND, k_pages, v_pages)
    check_scales(k_pages, k_scale, v_scale)
    require_rows(block_table=block_table_SP)
    require_contiguous(query_start=query_start_Z, kv_len=kv_len_S)
    group = num_heads // num_kv_heads
    rounded = is_rounded(q_TND.dtype)
    few_rows = FEW_ROWS if rounded else num_rows
    has_long = rounded and (num_rows if most_rows is None else min(most_rows, num_rows)) > FEW_ROWS

    table_keys = block_table_SP.shape[1] * page_size
    chunk = smallest_chunk(window)
    most_chunks = num_chunks(table_keys)
    if window is not None:
        most_chunks = min(triton.cdiv(table_keys, chunk), (window + min(num_rows, few_rows) - 2) // chunk + 2)
    by_row = not rounded or num_rows <= num_seqs * FEW_ROWS
    slots_R = num_rows if by_row else num_seqs * FEW_ROWS
    split = slots_R * num_heads * most_chunks * (head_dim + 2) * 4 <= partial_bytes
    held = (slots_R, num_heads, most_chunks) if split else (1, 1, 1)
    partial_o, partial_ml = carved(
        scratch, q_TND.device, ((*held, head_dim), torch.float32), ((*held, 2), torch.float32)
    )
    programs = min(max(2, min(MOST_PROGRAMS, PROGRAMS_PER_ROW_BLOCK // num_kv_heads)), most_chunks) if split else 1

    early = starts_early(q_TND)
    block_seqs = max(LEAST_BLOCK_OF_SEQUENCES, triton.next_power_of_2(num_seqs))
    grid = GRID if rounded else 0.0
    scale_log2 = scale * k_scale * LOG2_E
    values_scale = v_scale if k_pages.dtype == FP8 else None
    common = {
        "WINDOW": window or 0,
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "CHUNK": chunk,
        "MOST_CHUNKS": most_chunks,
        "MAX_SPLIT_ROWS": FEW_ROWS if rounded else 1 << 30,
        "BY_ROW": by_row,
        "BLOCK_S": block_seqs,
        "EARLY": early,
        "launch_pdl": early,
    }
    if tile is None:
        pairs = group * triton.cdiv(num_rows, num_seqs)
        tile = exact_tile(q_TND.dtype, head_dim, pairs, group, num_rows, is_fp8=k_pages.dtype == FP8)
    block_rows = tile.pairs // group
    blocks = num_rows // block_rows + num_seqs
    blocks_per_seq = triton.cdiv(min(num_rows, FEW_ROWS) if has_long else num_rows, block_rows)
    search = blocks <= num_seqs * blocks_per_seq or (num_rows > FEW_ROWS and not has_long)
    attend_exact_kernel[(blocks if search else num_seqs * blocks_per_seq, num_kv_heads, programs)](
        q_TND,
        k_pages,
        v_pages,
        block_table_SP,
        query_start_Z,
        kv_len_S,
        out_TND,
        partial_o,
        partial_ml,
        num_seqs,
        blocks_per_seq,
        scale_log2,
        q_TND.stride(0),
        q_TND.stride(1),
        *k_pages.stride()[:3],
        block_table_SP.stride(0),
        values_scale,
        **common,
        GROUP=group,
        GRID=grid,
        PAGE_SIZE=page_size,
        BLOCK_ROWS=block_rows,
        BLOCK_M=tile.pairs,
        BLOCK_L=tile.keys,
        SEARCH=search,
        SPLIT=split,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split and most_chunks > 1:
        combine_exact_kernel[(slots_R, num_heads)](
            out_TND,
            partial_o,
            partial_ml,
            query_start_Z,
            kv_len_S,
            num_seqs,
            values_scale,
            **common,
            BLOCK_C=triton.next_power_of_2(most_chunks),
            num_warps=4,
        )
    del partial_o, partial_ml  # a prompt's weights may take their place
    if has_long:
        attend_prompts(
            q_TND,
            k_pages,
            v_pages,
            block_table_SP,
            query_start_Z,
            kv_len_S,
            out_TND,
            window=window,
            scale_log2=scale_log2,
            v_scale=v_scale,
            grid=grid,
            restarts=True,
            tiles=prompt_tiles or exact_prompt_tiles(group),
            block_seqs=block_seqs,
            early=early,
            most_keys=most_keys,
        )
    return out_TND


def is_rounded(dtype: torch.dtype) -> bool:
    """Whether scores are rounded, so that programs of other tiles find the same bits: not in float32."""
    return dtype != torch.float32


def exact_tile(
    dtype: torch.dtype, head_dim: int, pairs: int, group: int, num_rows: int, *, is_fp8: bool = False
) -> Tile:
    """Choose the tile of few rows; arguments as of `short_tile`. In float32 keys are taken 16 at a time, always.

    A step of few rows has few programs, which are done sooner with a whole chunk at a time
    (`benchmarks/results/2026-11-29-h200-attention`).
    """
    smallest = max(16, triton.next_power_of_2(group))
    if dtype != torch.float32 and num_rows <= FEW_ROWS // 2:
        return Tile(pairs=smallest, keys=64, num_warps=8, num_stages=2)
    if dtype != torch.float32 and head_dim > 256:
        return Tile(pairs=smallest, keys=32, num_warps=8 if is_fp8 else 4, num_stages=2)
    return short_tile(dtype, head_dim, pairs, group, num_rows, is_fp8=is_fp8)


def exact_prompt_tiles(group: int) -> PromptTiles:
    """Choose the tiles of prompt chunks."""
    pairs = max(128, triton.next_power_of_2(group))
    return PromptTiles(pairs, 32, 8, 5, 128, 64, 128, 8, 4, 128, 128)
