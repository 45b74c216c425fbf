"""`paged_attention` in Triton: flash attention (Dao, arXiv 2205.14135) over pages, keys split for short rows.

A sequence of few rows (a decode or verify step) would keep few multiprocessors busy, so its keys are cut into chunks
at fixed places, one program each, whose partial softmaxes a second kernel combines (Flash-Decoding, Dao et al. 2023).
Where the cuts are depends on that sequence and on the call's shape, not on what other sequences hold. On Hopper most
such calls have kernels of their own (`few_rows_attention`). A sequence of many rows (a prompt chunk) is not cut.

The grid is sized by numbers that the host knows (rows, sequences, block-table width), so nothing waits for the device
and a CUDA graph can hold the launches.

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
K KV heads, G = N / K query heads a KV head, D head dim, M = (row, query head) pairs of one program, L keys of one tile,
C chunks of a sequence, R rows that may be split.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2
from typing import Any

import torch
import triton
from torch import Tensor

from gemray_kernels.attention_scratch import MIN_CHUNK, PROMPT_PAIRS, AttentionShape, Split, carved
from gemray_kernels.fp8_kv import FP8, check_scales
from gemray_kernels.layout import require_contiguous, require_rows
from gemray_kernels.reference.keys_of_values import KeysOfValues
from gemray_kernels.reference.paged_attention import FEW_ROWS
from gemray_kernels.triton.attend_kernels import attend_kernel, combine_kernel
from gemray_kernels.triton.attend_long import attend_long_kernel
from gemray_kernels.triton.early_start import starts_early
from gemray_kernels.triton.few_rows_attention import attend_few_rows
from gemray_kernels.triton.prompt_attention import PromptTiles, attend_prompts

LOG2_E = log2(e)
LEAST_BLOCK_OF_SEQUENCES = 64
"""Batches of up to this many sequences share their programs."""


@dataclass(frozen=True)
class Tile:
    """How much one program holds."""

    pairs: int
    keys: int
    num_warps: int
    num_stages: int


def paged_attention(
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
    long: Tile | None = None,
) -> Tensor:
    """Softmax attention [T, N, D]; arguments, masks and result as in `gemray_kernels.reference.paged_attention`.

    Sums are float32; probabilities are rounded to `q`'s dtype before they weigh the values. `q`, `k_pages` and
    `v_pages` are bfloat16 or float32, all the same, or both pages float8_e4m3fn; heads are contiguous. 8-bit floats are
    multiplied in `q`'s dtype, which holds them exactly; scores and sums are scaled, rather than they. Lengths, tables
    and keys before those of the rows are read before `q` is waited for: they must have been written before the last
    anchor (`early_start`).

    Which programs run follows from a few classes of row counts, so that a server has compiled all of them once its
    buckets are captured. Sequences of more than `FEW_ROWS` rows are not split: they fill the device, and their partial
    results would be large.

    Args:
        scratch: uint8 memory that no other stream uses, for what one kernel leaves for the next
            (`gemray_kernels.attention_scratch`); a call takes memory of its own where it is None or too small.
        tile: of short rows; chosen when None, or another kernel (`few_rows_attention`).
        long: of prompt chunks in one kernel; chosen when None, or two kernels. The others are the reference's.
    """
    num_rows, num_heads, head_dim = q_TND.shape
    num_seqs, num_kv_heads = len(kv_len_S), k_pages.shape[2]
    out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
    if num_rows == 0:
        return out_TND
    check_tensors(q_TND, k_pages, v_pages)
    check_scales(k_pages, k_scale, v_scale)
    require_rows(block_table=block_table_SP)
    require_contiguous(query_start=query_start_Z, kv_len=kv_len_S)
    group = num_heads // num_kv_heads
    page_size = k_pages.shape[1]
    early = starts_early(q_TND)
    most = most_of(num_rows, most_rows)
    if tile is None and attend_few_rows(
        q_TND,
        k_pages,
        v_pages,
        block_table_SP,
        query_start_Z,
        kv_len_S,
        out_TND,
        window=window,
        causal=causal,
        scale=scale,
        most_rows=most,
        keys_of_values=keys_of_values,
        reader_comes_ahead=reader_comes_ahead,
        scratch=scratch,
    ):
        return out_TND
    if tile is None:
        pairs = group * triton.cdiv(num_rows, num_seqs)
        tile = short_tile(q_TND.dtype, head_dim, pairs, group, num_rows, is_fp8=k_pages.dtype == FP8)
    programs = short_programs(
        out_TND,
        k_pages,
        block_table_SP,
        num_seqs,
        window=window,
        causal=causal,
        most_rows=most_rows,
        tile=tile,
        scratch=scratch,
    )
    strides = (q_TND.stride(0), q_TND.stride(1), *k_pages.stride()[:3], block_table_SP.stride(0))
    attend_kernel[programs.grid](
        q_TND,
        k_pages,
        v_pages,
        block_table_SP,
        query_start_Z,
        kv_len_S,
        out_TND,
        programs.partial_o,
        programs.partial_ml,
        num_seqs,
        programs.blocks_per_seq,
        scale * k_scale * LOG2_E,
        *strides,
        v_scale if k_pages.dtype == FP8 else None,
        **programs.both,
        **programs.attending,
    )
    programs.combine(out_TND, query_start_Z, kv_len_S)
    has_long = most > FEW_ROWS
    in_two = causal and long is None and most_keys is not None and in_two_kernels(q_TND.dtype, head_dim)
    if has_long and in_two:
        attend_prompts(
            q_TND,
            k_pages,
            v_pages,
            block_table_SP,
            query_start_Z,
            kv_len_S,
            out_TND,
            window=window,
            scale_log2=scale * k_scale * LOG2_E,
            v_scale=v_scale,
            grid=0.0,
            restarts=False,
            tiles=prompt_tiles(group, is_fp8=k_pages.dtype == FP8),
            block_seqs=programs.both["BLOCK_S"],
            early=early,
            most_keys=most_keys,
            scratch=scratch,
        )
    elif has_long:
        long = long or long_tile(q_TND.dtype, head_dim, group)
        block_rows = long.pairs // group
        attend_long_kernel[(num_rows // block_rows + num_seqs, num_kv_heads)](
            q_TND,
            k_pages,
            v_pages,
            block_table_SP,
            query_start_Z,
            kv_len_S,
            out_TND,
            num_seqs,
            scale * k_scale * LOG2_E,
            *strides,
            v_scale if k_pages.dtype == FP8 else None,
            WINDOW=window or 0,
            CAUSAL=causal,
            NUM_HEADS=num_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_D=programs.both["BLOCK_D"],
            FEW_ROWS=FEW_ROWS,
            BLOCK_S=programs.both["BLOCK_S"],
            EARLY=early,
            launch_pdl=early,
            PAGE_SIZE=page_size,
            BLOCK_ROWS=block_rows,
            BLOCK_M=long.pairs,
            BLOCK_L=long.keys,
            num_warps=long.num_warps,
            num_stages=long.num_stages,
        )
    return out_TND


@dataclass(frozen=True)
class ShortPrograms:
    """The programs of short rows: how many, of which constants, and where their partial results lie."""

    grid: tuple[int, int, int]
    blocks_per_seq: int
    partial_o: Tensor
    partial_ml: Tensor
    both: dict[str, Any]
    """Constants of both kernels."""
    attending: dict[str, Any]
    """Further ones of that which attends."""

    def combine(self, out_TND: Tensor, query_start_Z: Tensor, kv_len_S: Tensor) -> None:
        """Combine the partial results of every row."""
        slots_R, num_heads, grid_chunks, _ = self.partial_ml.shape
        combine_kernel[(slots_R, num_heads)](
            out_TND,
            self.partial_o,
            self.partial_ml,
            query_start_Z,
            kv_len_S,
            len(kv_len_S),
            **self.both,
            BLOCK_C=triton.next_power_of_2(grid_chunks),
            LETS_AT_ONCE=False,
            num_warps=4,
        )


def short_programs(
    out_TND: Tensor,
    k_pages: Tensor,
    block_table_SP: Tensor,
    num_seqs: int,
    *,
    window: int | None,
    causal: bool,
    most_rows: int | None,
    tile: Tile,
    scratch: Tensor | None,
) -> ShortPrograms:
    """Choose the programs of short rows, and give them room for their partial results."""
    num_rows, num_heads, head_dim = out_TND.shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    group = num_heads // num_kv_heads
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, window, block_table_SP.shape[1] * page_size)
    split = Split.of(shape, num_rows, num_seqs)
    parts = (split.slots, num_heads, split.grid_chunks)
    partial_o, partial_ml = carved(
        scratch, out_TND.device, ((*parts, head_dim), torch.float32), ((*parts, 2), torch.float32)
    )
    early = starts_early(out_TND)
    has_long = most_of(num_rows, most_rows) > FEW_ROWS
    block_rows = tile.pairs // group
    blocks = num_rows // block_rows + num_seqs
    # Beside a long chunk, whose rows are the other kernel's, a short sequence still has few blocks; programs that find
    # nothing to do cost more than what they would look for, one for each chunk of keys.
    blocks_per_seq = triton.cdiv(min(num_rows, FEW_ROWS) if has_long else num_rows, block_rows)
    # Which sequence a block belongs to is looked up, but where few rows make so few blocks a sequence.
    search = blocks <= num_seqs * blocks_per_seq or (num_rows > FEW_ROWS and not has_long)
    return ShortPrograms(
        grid=(blocks if search else num_seqs * blocks_per_seq, num_kv_heads, split.grid_chunks),
        blocks_per_seq=blocks_per_seq,
        partial_o=partial_o,
        partial_ml=partial_ml,
        both={
            "WINDOW": window or 0,
            "CAUSAL": causal,
            "NUM_HEADS": num_heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
            "MOST_CHUNKS": split.most_chunks,
            "GRID_CHUNKS": split.grid_chunks,
            "MIN_CHUNK": MIN_CHUNK,
            "MAX_SPLIT_ROWS": FEW_ROWS,
            "BY_ROW": split.by_row,
            "BLOCK_S": max(LEAST_BLOCK_OF_SEQUENCES, triton.next_power_of_2(num_seqs)),
            "EARLY": early,
            "launch_pdl": early,
        },
        attending={
            "PAGE_SIZE": page_size,
            "BLOCK_ROWS": block_rows,
            "BLOCK_M": tile.pairs,
            "BLOCK_L": tile.keys,
            "SEARCH": search,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        },
    )


def most_of(num_rows: int, most_rows: int | None) -> int:
    """The most rows of a sequence among so many rows."""
    return num_rows if most_rows is None else min(most_rows, num_rows)


def short_tile(
    dtype: torch.dtype, head_dim: int, pairs: int, group: int, num_rows: int, *, is_fp8: bool = False
) -> Tile:
    """Choose the tile of decode and verify rows.

    Blocks of one sequence read the same keys at the same time, from the cache: several small ones are faster than
    one large one, but where heads are small, or large and rows many. Measured on an H100:
    `benchmarks/results/2026-11-28-h100-products`.

    Args:
        dtype: of queries.
        head_dim: of a head.
        pairs: (row, head) pairs of a sequence and KV head, about.
        group: query heads a KV head.
        num_rows: of all sequences.
        is_fp8: whether pages hold 8-bit floats. Widening a large tile of them takes the registers of more warps
            (compiled for sm_90: 256 bytes a thread spill with four, none with eight).
    """
    smallest = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return Tile(pairs=smallest, keys=16, num_warps=4, num_stages=1)
    if head_dim <= 128 and pairs >= 64:
        smallest = max(64, smallest)
    elif head_dim > 256 and num_rows > 64:
        smallest = max(32, smallest)
        return Tile(pairs=smallest, keys=32, num_warps=8 if is_fp8 else 4, num_stages=2)
    return Tile(pairs=smallest, keys=32, num_warps=4, num_stages=2)


def in_two_kernels(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether prompts whose length the host knows are attended by two kernels.

    With wide heads, in 16 bits, they take 0.63 of one kernel's time (`benchmarks/results/2026-11-29-h200-attention`). A
    captured step would launch them for every round that the longest sequence may have.
    """
    return head_dim > 256 and dtype != torch.float32


def prompt_tiles(group: int, *, is_fp8: bool) -> PromptTiles:
    """The tiles of the two kernels.

    Two programs a multiprocessor that spill a few registers are faster than one that does not, as measured with
    bfloat16 pages; widened values take yet more registers.
    """
    pairs = max(PROMPT_PAIRS, triton.next_power_of_2(group))
    return PromptTiles(pairs, 32, 8, 5, 128, 128, 64, 8, 5, 128, None if is_fp8 else 128)


def long_tile(dtype: torch.dtype, head_dim: int, group: int) -> Tile:
    """The tile of a prompt chunk."""
    smallest = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return Tile(pairs=smallest, keys=16, num_warps=4, num_stages=1)
    if head_dim > 256:
        return Tile(pairs=max(64, smallest), keys=32, num_warps=8, num_stages=3)
    return Tile(pairs=max(128, smallest), keys=64, num_warps=8, num_stages=3)


def check_tensors(q_TND: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    """Raise ValueError where dtypes or layouts are none that the kernels take."""
    fits = q_TND.dtype in (torch.bfloat16, torch.float32) and k_pages.dtype in (q_TND.dtype, FP8)
    if not fits or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"q, k_pages and v_pages are {q_TND.dtype}, {k_pages.dtype} and {v_pages.dtype}; one of bfloat16 and "
            f"float32 for q is allowed, and the same or {FP8} for both pages"
        )
    if q_TND.stride(2) != 1 or k_pages.stride(3) != 1 or k_pages.stride() != v_pages.stride():
        raise ValueError("heads of q and of the pages must be contiguous, and K and V pages laid out alike")
