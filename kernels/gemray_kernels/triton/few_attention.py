"""Attention of few programs from the host's side: which calls, and their launches.

Shape legend: as in `attend_few`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import torch
import triton
from torch import Tensor

from gemray_kernels.attention_scratch import FewSplit, carved
from gemray_kernels.reference.paged_attention import FEW_ROWS
from gemray_kernels.triton.attend_few import GROUP_KEYS, HEAD_DIM, attend_few_kernel
from gemray_kernels.triton.attend_kernels import combine_kernel
from gemray_kernels.triton.attend_spans import MANY_ROWS
from gemray_kernels.triton.early_start import starts_early

MOST_PROGRAMS = {8: 32, 16: 16}
"""Programs for each chunk of keys, by pairs of a program: with more, another kernel is faster
(`benchmarks/results/2026-11-30-h200-attention`)."""
VERY_FEW = 8
"""So few that smaller chunks of one row's keys pay."""


@dataclass(frozen=True)
class FewTile:
    """How much one program holds."""

    pairs: int
    """8 or 16."""
    warps: int
    """2 or 4, each of 16 keys: together the least chunk."""


def few_tile(
    q_TND: Tensor, k_pages: Tensor, num_seqs: int, *, window: int | None, causal: bool, most_rows: int
) -> FewTile | None:
    """The tile of a call whose programs are few, None of all others.

    It follows from the call's shape alone.

    Args:
        q_TND: queries.
        k_pages: keys, laid out as values are.
        num_seqs: sequences, the null slot among them.
        window: keys that a row sees.
        causal: whether a row sees no later key than its own.
        most_rows: of a sequence that sees keys.
    """
    num_heads, head_dim = q_TND.shape[1:]
    page_size, num_kv_heads = k_pages.shape[1:3]
    group = num_heads // num_kv_heads
    fits = causal and window is not None and head_dim == HEAD_DIM.value and page_size % GROUP_KEYS.value == 0
    fits &= q_TND.dtype == k_pages.dtype == torch.bfloat16 and group <= 16 and most_rows <= FEW_ROWS
    if not fits or not starts_early(q_TND):
        return None
    pairs = 8 if most_rows * group <= 8 else 16
    programs = max(1, num_seqs - 1) * num_kv_heads * triton.cdiv(most_rows, pairs // group)
    if most_rows > MANY_ROWS.value:  # whose chunks hold more keys
        programs //= 2
    if programs > MOST_PROGRAMS[pairs]:
        return None
    return FewTile(pairs, 2 if pairs == 8 and programs <= VERY_FEW else 4)


def attend_few(
    q_TND: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table_SP: Tensor,
    query_start_Z: Tensor,
    kv_len_S: Tensor,
    out_TND: Tensor,
    tile: FewTile,
    *,
    window: int,
    causal: bool,
    scale: float,
    most_rows: int,
    lets_at_once: bool,
    scratch: Tensor | None,
) -> None:
    """Attend for every row; arguments as of `paged_attention`, of a call that has this tile.

    With `lets_at_once` the kernel behind starts with the last one here, and not when that has what it reads.
    """
    num_rows, num_heads, head_dim = q_TND.shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    num_seqs, group = len(kv_len_S), num_heads // num_kv_heads
    block_rows = tile.pairs // group
    blocks_per_seq = triton.cdiv(most_rows, block_rows)
    split = FewSplit.of(block_table_SP.shape[1] * page_size, window, GROUP_KEYS.value * tile.warps)
    parts = (num_rows, num_heads, split.chunks)
    partial_o, partial_ml = carved(
        scratch, out_TND.device, ((*parts, head_dim), torch.float32), ((*parts, 2), torch.float32)
    )
    both = {
        "WINDOW": window,
        "CAUSAL": causal,
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "MOST_CHUNKS": split.chunks,
        "GRID_CHUNKS": split.chunks,
        "MIN_CHUNK": split.min_chunk,
        "MAX_SPLIT_ROWS": FEW_ROWS,
        "EARLY": True,
        "launch_pdl": True,
    }
    attend_few_kernel[(num_seqs * blocks_per_seq, num_kv_heads, split.chunks)](
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
        scale * log2(e),
        q_TND.stride(0),
        q_TND.stride(1),
        k_pages.stride(0),
        k_pages.stride(2),
        block_table_SP.stride(0),
        **both,
        PAGE_SIZE=page_size,
        SLOT=k_pages.stride(1),
        BLOCK_ROWS=block_rows,
        PAIRS=tile.pairs,
        WARPS=tile.warps,
        num_warps=tile.warps,
    )
    combine_kernel[(num_rows, num_heads)](
        out_TND,
        partial_o,
        partial_ml,
        query_start_Z,
        kv_len_S,
        num_seqs,
        **both,
        HEAD_DIM=head_dim,
        BLOCK_D=head_dim,
        BY_ROW=True,
        LETS_AT_ONCE=lets_at_once,
        BLOCK_S=64,
        BLOCK_C=triton.next_power_of_2(split.chunks),
        num_warps=4,
    )
