"""`paged_attention` in Triton: flash attention (Dao, arXiv 2205.14135) over pages, keys split for short rows.

A sequence of few rows (a decode or verify step) would keep few multiprocessors busy, so its keys are cut into chunks
at fixed places, one program each, whose partial softmaxes a second kernel combines (Flash-Decoding, Dao et al. 2023).
Where the cuts are depends on that sequence alone. A sequence of many rows (a prompt chunk) is not cut.

The grid is sized by numbers that the host knows (rows, sequences, block-table width), so nothing waits for the device
and a CUDA graph can hold the launches.

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
K KV heads, G = N / K query heads a KV head, D head dim, M = (row, query head) pairs of one program, L keys of one tile,
C chunks of a sequence, R rows that may be split.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.layout import require_contiguous, require_rows
from gemray_kernels.triton.dot import dot
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs

MAX_SPLIT_ROWS = 32
"""Sequences of more rows are not split: they fill the device, and their partial results would be large."""
MIN_CHUNK = 32
"""Keys of a chunk, at least."""
MAX_CHUNKS = 32
LOG2_E = log2(e)
PROGRAMS_PER_ROW_BLOCK = 264
"""Enough programs for one block of rows, all KV heads together; more only add partial results."""
MOST_CHUNKS_OF_LAST = 12
"""Partial results of more chunks are combined by a kernel with a program a row and head."""
MOST_ARRIVALS = 1 << 16


@dataclass(frozen=True)
class Tile:
    """How much one program holds."""

    pairs: int
    keys: int
    num_warps: int
    num_stages: int


class PagedAttention:
    """`paged_attention` of one device and stream, where the last of a block's programs combines what all have found."""

    def __init__(self, device: torch.device) -> None:
        # Counts programs that are done. The last one sets its counter back to 0.
        self._arrivals = torch.zeros(MOST_ARRIVALS, dtype=torch.int32, device=device)

    def __call__(
        self,
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
    ) -> Tensor:
        """As `paged_attention`."""
        return paged_attention(
            q_TND,
            k_pages,
            v_pages,
            block_table_SP,
            query_start_Z,
            kv_len_S,
            window=window,
            causal=causal,
            scale=scale,
            most_rows=most_rows,
            arrivals=self._arrivals,
        )


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
    arrivals: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Softmax attention [T, N, D]; arguments, masks and result as in `gemray_kernels.reference.paged_attention`.

    Sums are float32; probabilities are rounded to `q`'s dtype before they weigh the values. `q`, `k_pages` and
    `v_pages` are bfloat16 or float32, all the same, with heads contiguous.

    Args (beside the reference's):
        arrivals: int32 zeros that no other stream uses, left as zeros; without them partial results are combined by a
            kernel of their own.
        tile: of short rows; chosen when None.
    """
    num_rows, num_heads, head_dim = q_TND.shape
    num_seqs, num_kv_heads = len(kv_len_S), k_pages.shape[2]
    out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
    if num_rows == 0:
        return out_TND
    _check(q_TND, k_pages, v_pages)
    require_rows(block_table=block_table_SP)
    require_contiguous(query_start=query_start_Z, kv_len=kv_len_S)
    group = num_heads // num_kv_heads
    page_size = k_pages.shape[1]

    most_chunks = max(2, min(MAX_CHUNKS, PROGRAMS_PER_ROW_BLOCK // num_kv_heads))
    most_keys = block_table_SP.shape[1] * page_size
    if window is not None:
        most_keys = min(most_keys, window + MAX_SPLIT_ROWS)
    grid_chunks = min(most_chunks, most_keys // MIN_CHUNK + 2)

    most_rows = num_rows if most_rows is None else min(most_rows, num_rows)
    split_rows = min(MAX_SPLIT_ROWS, most_rows)
    by_row = num_rows <= num_seqs * MAX_SPLIT_ROWS
    slots_R = num_rows if by_row else num_seqs * MAX_SPLIT_ROWS
    partial_o = torch.empty(slots_R, num_heads, grid_chunks, head_dim, dtype=torch.float32, device=q_TND.device)
    partial_ml = torch.empty(slots_R, num_heads, grid_chunks, 2, dtype=torch.float32, device=q_TND.device)

    early = starts_early(q_TND)
    block_seqs = triton.next_power_of_2(num_seqs)
    common = {
        "WINDOW": window or 0,
        "CAUSAL": causal,
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "MOST_CHUNKS": most_chunks,
        "GRID_CHUNKS": grid_chunks,
        "MIN_CHUNK": MIN_CHUNK,
        "MAX_SPLIT_ROWS": MAX_SPLIT_ROWS,
        "BY_ROW": by_row,
        "BLOCK_S": block_seqs,
        "EARLY": early,
        "launch_pdl": early,
    }

    def attend(tile: Tile, *, split: bool) -> bool:
        """Whether nothing is left to combine."""
        block_rows = tile.pairs // group
        blocks = num_rows // block_rows + num_seqs
        blocks_per_seq = triton.cdiv(split_rows, block_rows)
        search = not split or blocks <= num_seqs * blocks_per_seq
        blocks = blocks if search else num_seqs * blocks_per_seq
        combine = (
            split
            and arrivals is not None
            and grid_chunks <= MOST_CHUNKS_OF_LAST
            and blocks * num_kv_heads <= len(arrivals)
        )
        _attend_kernel[(blocks, num_kv_heads, grid_chunks if split else 1)](
            q_TND,
            k_pages,
            v_pages,
            block_table_SP,
            query_start_Z,
            kv_len_S,
            out_TND,
            partial_o,
            partial_ml,
            arrivals if combine else kv_len_S,
            num_seqs,
            blocks_per_seq,
            scale * LOG2_E,
            q_TND.stride(0),
            q_TND.stride(1),
            k_pages.stride(0),
            k_pages.stride(1),
            k_pages.stride(2),
            block_table_SP.stride(0),
            **common,
            PAGE_SIZE=page_size,
            BLOCK_ROWS=block_rows,
            BLOCK_M=tile.pairs,
            BLOCK_L=tile.keys,
            SPLIT=split,
            SEARCH=search,
            COMBINE=combine,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return combine

    if tile is None:
        tile = short_tile(q_TND.dtype, head_dim, group * triton.cdiv(num_rows, num_seqs), group)
    if not attend(tile, split=True):
        _combine_kernel[(slots_R, num_heads)](
            out_TND,
            partial_o,
            partial_ml,
            query_start_Z,
            kv_len_S,
            num_seqs,
            **common,
            BLOCK_C=triton.next_power_of_2(grid_chunks),
            num_warps=4,
        )
    if most_rows > MAX_SPLIT_ROWS:
        attend(long_tile(q_TND.dtype, head_dim, group), split=False)
    return out_TND


def short_tile(dtype: torch.dtype, head_dim: int, pairs: int, group: int) -> Tile:
    """Choose the tile of decode and verify rows, for about `pairs` (row, head) pairs of a sequence and KV head.

    Blocks of one sequence read the same keys at the same time, from the cache: several small ones are faster than
    one large one. Measured on an H100: `benchmarks/results/2026-11-28-h100-products`.
    """
    smallest = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return Tile(pairs=smallest, keys=16, num_warps=4, num_stages=1)
    if pairs <= 64:
        return Tile(pairs=smallest, keys=32, num_warps=4, num_stages=2)
    return Tile(pairs=max(32, smallest), keys=32 if head_dim > 256 else 64, num_warps=4, num_stages=2)


def long_tile(dtype: torch.dtype, head_dim: int, group: int) -> Tile:
    """The tile of a prompt chunk."""
    smallest = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return Tile(pairs=smallest, keys=16, num_warps=4, num_stages=1)
    if head_dim > 256:
        return Tile(pairs=max(64, smallest), keys=32, num_warps=8, num_stages=2)
    return Tile(pairs=max(128, smallest), keys=64, num_warps=8, num_stages=2)


def _check(q_TND: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    if not q_TND.dtype == k_pages.dtype == v_pages.dtype or q_TND.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"q, k_pages and v_pages are {q_TND.dtype}, {k_pages.dtype} and {v_pages.dtype}; "
            "one of bfloat16 and float32 for all is allowed"
        )
    if q_TND.stride(2) != 1 or k_pages.stride(3) != 1 or k_pages.stride() != v_pages.stride():
        raise ValueError("heads of q and of the pages must be contiguous, and K and V pages laid out alike")


@triton.jit  # type: ignore[untyped-decorator]
def _chunk_keys(  # type: ignore[no-untyped-def]
    num_rows, kv_len, WINDOW: tl.constexpr, GROUP: tl.constexpr, MOST_CHUNKS: tl.constexpr, MIN_CHUNK: tl.constexpr
):
    """Keys of a chunk of this sequence; its first chunk holds the first key that any of its rows sees.

    At least 2 for each (row, head) pair, so that partial results stay fewer bytes than keys; at least so many that
    MOST_CHUNKS - 1 of them cover the keys, which may begin and end inside a chunk.
    """
    span = kv_len
    if WINDOW > 0:
        span = tl.minimum(kv_len, WINDOW + num_rows)
    for_rows = (2 * num_rows * GROUP + MIN_CHUNK - 1) // MIN_CHUNK
    for_span = (span + MIN_CHUNK * (MOST_CHUNKS - 1) - 1) // (MIN_CHUNK * (MOST_CHUNKS - 1))
    return tl.maximum(tl.maximum(for_rows, for_span), 1) * MIN_CHUNK


@triton.jit  # type: ignore[untyped-decorator]
def _first_key(position, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key that a query at `position` sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    return first


@triton.jit(do_not_specialize=["num_seqs", "blocks_per_seq"])  # type: ignore[untyped-decorator]
def _attend_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0912, PLR0915
    q_TND,
    k_pages,
    v_pages,
    table_SP,
    query_start_Z,
    kv_len_S,
    out_TND,
    partial_o,
    partial_ml,
    arrivals,
    num_seqs,
    blocks_per_seq,
    scale_log2,
    q_row_stride,
    q_head_stride,
    page_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
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
    SPLIT: tl.constexpr,
    SEARCH: tl.constexpr,
    COMBINE: tl.constexpr,
):
    wait_for_inputs(EARLY)
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    if SEARCH:
        # Sequence s has the blocks from start[s] // BLOCK_ROWS + s on: as many as it needs, or one more.
        s_S = tl.arange(0, BLOCK_S)
        start_S = tl.load(query_start_Z + s_S, mask=s_S < num_seqs, other=0).to(tl.int32)
        begins_before = (start_S // BLOCK_ROWS + s_S <= block) & (s_S < num_seqs)
        sequence = tl.sum(begins_before.to(tl.int32)) - 1
        start = tl.load(query_start_Z + sequence).to(tl.int32)
        first_row = (block - start // BLOCK_ROWS - sequence) * BLOCK_ROWS
    else:
        sequence = block // blocks_per_seq
        start = tl.load(query_start_Z + sequence).to(tl.int32)
        first_row = (block % blocks_per_seq) * BLOCK_ROWS
    num_rows = tl.load(query_start_Z + sequence + 1).to(tl.int32) - start
    if first_row >= num_rows or (num_rows <= MAX_SPLIT_ROWS) != SPLIT:
        return
    kv_len = tl.load(kv_len_S + sequence).to(tl.int32)

    pair_M = tl.arange(0, BLOCK_M)
    row_M = first_row + pair_M // GROUP
    head_M = kv_head * GROUP + pair_M % GROUP
    is_row_M = (pair_M < BLOCK_ROWS * GROUP) & (row_M < num_rows)
    position_M = kv_len - num_rows + row_M
    last_row = tl.minimum(first_row + BLOCK_ROWS, num_rows) - 1

    # Keys [begin, end) that some row of this block sees, in this program's chunk.
    begin = _first_key(kv_len - num_rows + first_row, WINDOW)
    end = kv_len
    if CAUSAL:
        end = kv_len - num_rows + last_row + 1
    is_direct = True
    chunk = tl.program_id(2)
    first_of_block = 0
    end_of_block = 0
    if SPLIT:
        chunk_keys = _chunk_keys(num_rows, kv_len, WINDOW, GROUP, MOST_CHUNKS, MIN_CHUNK)
        first_chunk = _first_key(kv_len - num_rows, WINDOW) // chunk_keys
        is_direct = (kv_len - 1) // chunk_keys - first_chunk < 1
        if is_direct:
            if chunk > 0:
                return
        else:
            first_of_block = begin // chunk_keys - first_chunk
            end_of_block = (end - 1) // chunk_keys - first_chunk + 1
            begin = tl.maximum(begin, (first_chunk + chunk) * chunk_keys)
            end = tl.minimum(end, (first_chunk + chunk + 1) * chunk_keys)
            if begin >= end:
                return

    d_D = tl.arange(0, BLOCK_D)
    in_head_D = d_D < HEAD_DIM
    q_at_M = (start + row_M).to(tl.int64) * q_row_stride + head_M * q_head_stride
    q_MD = tl.load(q_TND + q_at_M[:, None] + d_D[None, :], mask=is_row_M[:, None] & in_head_D[None, :], other=0.0)

    largest_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_P = table_SP + sequence.to(tl.int64) * table_stride
    for first in range(begin // BLOCK_L * BLOCK_L, end, BLOCK_L):
        key_L = first + tl.arange(0, BLOCK_L)
        # Slots outside are never read: they may hold anything, and 0 · NaN is NaN.
        inside_L = (key_L >= begin) & (key_L < end)
        page_L = tl.load(table_P + key_L // PAGE_SIZE, mask=inside_L, other=0).to(tl.int64)
        at_L = page_L * page_stride + (key_L % PAGE_SIZE) * slot_stride + kv_head * kv_head_stride
        k_DL = tl.load(k_pages + at_L[None, :] + d_D[:, None], mask=inside_L[None, :] & in_head_D[:, None], other=0.0)
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
        acc_MD = acc_MD * rescale_M[:, None]
        acc_MD = dot(weight_ML.to(v_LD.dtype), v_LD, acc_MD)

    is_stored_MD = is_row_M[:, None] & in_head_D[None, :]
    if is_direct:
        acc_MD = acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]  # rows that see no key give zeros
        out_at_M = ((start + row_M).to(tl.int64) * NUM_HEADS + head_M) * HEAD_DIM
        tl.store(out_TND + out_at_M[:, None] + d_D[None, :], acc_MD.to(out_TND.dtype.element_ty), mask=is_stored_MD)
    else:
        slot_M = row_M + (start if BY_ROW else sequence * MAX_SPLIT_ROWS)
        partial_M = (slot_M.to(tl.int64) * NUM_HEADS + head_M) * GRID_CHUNKS + chunk
        tl.store(partial_o + partial_M[:, None] * HEAD_DIM + d_D[None, :], acc_MD, mask=is_stored_MD)
        tl.store(partial_ml + partial_M * 2, largest_M, mask=is_row_M)
        tl.store(partial_ml + partial_M * 2 + 1, sum_M, mask=is_row_M)
        if COMBINE:
            tl.debug_barrier()  # every thread's results are stored before one thread says so
            counter = arrivals + block * tl.num_programs(1) + kv_head
            if tl.atomic_add(counter, 1) == end_of_block - first_of_block - 1:
                tl.store(counter, 0)
                partial_M = (slot_M.to(tl.int64) * NUM_HEADS + head_M) * GRID_CHUNKS
                largest_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
                for c in range(first_of_block, end_of_block):
                    found_M = tl.load(
                        partial_ml + (partial_M + c) * 2, mask=is_row_M, other=float("-inf"), cache_modifier=".cg"
                    )
                    largest_M = tl.maximum(largest_M, found_M)
                shift_M = tl.where(largest_M == float("-inf"), 0.0, largest_M)
                sum_M = tl.zeros([BLOCK_M], tl.float32)
                acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                for c in range(first_of_block, end_of_block):
                    at_M = partial_M + c
                    found_M = tl.load(partial_ml + at_M * 2, mask=is_row_M, other=float("-inf"), cache_modifier=".cg")
                    weight_M = tl.exp2(found_M - shift_M)
                    sum_M += weight_M * tl.load(
                        partial_ml + at_M * 2 + 1, mask=is_row_M, other=0.0, cache_modifier=".cg"
                    )
                    acc_MD += weight_M[:, None] * tl.load(
                        partial_o + at_M[:, None] * HEAD_DIM + d_D[None, :],
                        mask=is_stored_MD,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                acc_MD = acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
                out_at_M = ((start + row_M).to(tl.int64) * NUM_HEADS + head_M) * HEAD_DIM
                tl.store(
                    out_TND + out_at_M[:, None] + d_D[None, :], acc_MD.to(out_TND.dtype.element_ty), mask=is_stored_MD
                )


@triton.jit(do_not_specialize=["num_seqs"])  # type: ignore[untyped-decorator]
def _combine_kernel(  # type: ignore[no-untyped-def]
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
):
    wait_for_inputs(EARLY)
    slot = tl.program_id(0)
    head = tl.program_id(1)
    if BY_ROW:
        s_S = tl.arange(0, BLOCK_S)
        end_S = tl.load(query_start_Z + 1 + s_S, mask=s_S < num_seqs, other=2147483647).to(tl.int32)
        sequence = tl.sum((end_S <= slot).to(tl.int32))
        start = tl.load(query_start_Z + sequence).to(tl.int32)
        row = slot - start
    else:
        sequence = slot // MAX_SPLIT_ROWS
        start = tl.load(query_start_Z + sequence).to(tl.int32)
        row = slot % MAX_SPLIT_ROWS
    num_rows = tl.load(query_start_Z + sequence + 1).to(tl.int32) - start
    if row >= num_rows or num_rows > MAX_SPLIT_ROWS:
        return
    kv_len = tl.load(kv_len_S + sequence).to(tl.int32)
    chunk_keys = _chunk_keys(num_rows, kv_len, WINDOW, GROUP, MOST_CHUNKS, MIN_CHUNK)
    first_chunk = _first_key(kv_len - num_rows, WINDOW) // chunk_keys
    if (kv_len - 1) // chunk_keys - first_chunk < 1:
        return

    # The chunks that hold keys of this row; the others' partial results were never written.
    position = kv_len - num_rows + row
    begin = _first_key(position, WINDOW)
    end = kv_len
    if CAUSAL:
        end = position + 1
    chunk_C = tl.arange(0, BLOCK_C)
    key_C = (first_chunk + chunk_C) * chunk_keys
    holds_C = (key_C < end) & (key_C + chunk_keys > begin) & (chunk_C < GRID_CHUNKS)
    partial_C = (slot.to(tl.int64) * NUM_HEADS + head) * GRID_CHUNKS + chunk_C
    largest_C = tl.load(partial_ml + partial_C * 2, mask=holds_C, other=float("-inf"))
    sum_C = tl.load(partial_ml + partial_C * 2 + 1, mask=holds_C, other=0.0)
    largest = tl.max(largest_C, axis=0)
    weight_C = tl.exp2(largest_C - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weight_C * sum_C, axis=0)
    d_D = tl.arange(0, BLOCK_D)
    in_head_D = d_D < HEAD_DIM
    o_CD = tl.load(
        partial_o + partial_C[:, None] * HEAD_DIM + d_D[None, :], mask=holds_C[:, None] & in_head_D[None, :], other=0.0
    )
    o_D = tl.sum(o_CD * weight_C[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    out_at = ((start + row).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_TND + out_at + d_D, o_D.to(out_TND.dtype.element_ty), mask=in_head_D)
