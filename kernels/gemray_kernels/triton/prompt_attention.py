"""Attention of prompt chunks in two kernels, round by round: `attend_in_two` from the host's side.

Shape legend: as in `attend_in_two`; U sums that a block keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from gemray_kernels.attention_scratch import KEYS, ROUND_KEYS, WEIGHTS_BYTES, carved
from gemray_kernels.fp8_kv import FP8
from gemray_kernels.reference.paged_attention import FEW_ROWS
from gemray_kernels.triton.attend_in_two import attend_values_kernel, attend_weights_kernel
from gemray_kernels.triton.exact_softmax import SMALL_CHUNKS_END, smallest_chunk


@dataclass(frozen=True)
class Round:
    """Keys that one launch of each kernel takes."""

    first_tile: int
    num_tiles: int
    tile_keys: int


@dataclass(frozen=True)
class PromptTiles:
    """How much a program of each kernel holds."""

    pairs: int
    depth: int
    """Columns of queries and keys that are multiplied at a time."""
    weights_warps: int
    weights_stages: int
    values_pairs: int
    """Divides `pairs`."""
    columns: int
    """Columns of values."""
    values_keys: int
    """Keys at a time."""
    values_warps: int
    values_stages: int
    weights_registers: int | None = None
    """Registers of a thread, at most, so that two programs fit a multiprocessor."""
    values_registers: int | None = None


def attend_prompts(
    q_TND: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table_SP: Tensor,
    query_start_Z: Tensor,
    kv_len_S: Tensor,
    out_TND: Tensor,
    *,
    window: int | None,
    scale_log2: float,
    v_scale: float,
    grid: float,
    restarts: bool,
    tiles: PromptTiles,
    block_seqs: int,
    early: bool,
    most_keys: int | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Attend causally with the rows of sequences of more than `FEW_ROWS` rows.

    Args:
        q_TND: as all tensors before `out_TND`, of `paged_attention`.
        out_TND: takes the result of these rows.
        window: keys a query sees.
        scale_log2: multiplies the scores, the keys' own scale in it.
        v_scale: multiplies the values where pages hold 8-bit floats.
        grid: to what scores are rounded (`exact_softmax`).
        restarts: whether sums are cut at chunks.
        tiles: of both kernels.
        block_seqs: power of two that is at least the number of sequences.
        early: whether the kernels may start before the one before them ends.
        most_keys: of such a sequence; what block tables hold when None, in as many rounds.
        scratch: uint8 memory for weights, scales and sums between kernels; a round has as many keys as it holds, and a
            call takes memory of its own where it is None or holds no round.
    """
    num_rows, num_heads, head_dim = q_TND.shape
    num_seqs, num_kv_heads, page_size = len(kv_len_S), k_pages.shape[2], k_pages.shape[1]
    group = num_heads // num_kv_heads
    block_rows = tiles.pairs // group
    blocks = num_rows // block_rows + num_seqs
    chunk = smallest_chunk(window) if restarts else 0
    key_bytes = blocks * num_kv_heads * tiles.pairs * q_TND.element_size()
    table_keys = block_table_SP.shape[1] * page_size
    most_keys = table_keys if most_keys is None else min(max(1, most_keys), table_keys)
    bytes_beside = blocks * num_kv_heads * 3 * tiles.pairs * 4 + 4 * out_TND.numel() + 1024
    weights_bytes = WEIGHTS_BYTES
    if scratch is not None:
        # Two scales of 4 bytes for each tile's pair, beside its weights.
        per_tile = KEYS * q_TND.element_size()
        weights_bytes = min(weights_bytes, (scratch.numel() - bytes_beside) * per_tile // (per_tile + 8))
    rounds = rounds_of(most_keys, window, block_rows, chunk, key_bytes, weights_bytes)
    most_tiles = max(part.num_tiles for part in rounds)
    round_keys = max(part.num_tiles * part.tile_keys for part in rounds)
    weights_BKXML, scales_BKX2M, totals_BK3M, carried_TND = carved(
        scratch,
        q_TND.device,
        ((blocks * num_kv_heads * tiles.pairs * round_keys,), q_TND.dtype),
        ((blocks, num_kv_heads, most_tiles, 2, tiles.pairs), torch.float32),
        ((blocks, num_kv_heads, 3, tiles.pairs), torch.float32),
        (out_TND.shape if len(rounds) > 1 else (1,), torch.float32),
    )
    common = {
        "WINDOW": window or 0,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "FEW_ROWS": FEW_ROWS,
        "BLOCK_S": block_seqs,
        "EARLY": early,
        "launch_pdl": early,
        "PAGE_SIZE": page_size,
        "BLOCK_ROWS": block_rows,
        "CHUNK": chunk,
    }
    where = (block_table_SP, query_start_Z, kv_len_S)
    strides = (*k_pages.stride()[:3], block_table_SP.stride(0))
    columns = min(tiles.columns, max(16, triton.next_power_of_2(head_dim)))
    parts = tiles.pairs // tiles.values_pairs
    for part in rounds:
        attend_weights_kernel[(blocks, num_kv_heads)](
            q_TND,
            k_pages,
            *where,
            weights_BKXML,
            scales_BKX2M,
            totals_BK3M,
            num_seqs,
            part.first_tile,
            part.num_tiles,
            scale_log2,
            q_TND.stride(0),
            q_TND.stride(1),
            *strides,
            **common,
            BLOCK_M=tiles.pairs,
            BLOCK_L=part.tile_keys,
            BLOCK_K=min(tiles.depth, max(16, triton.next_power_of_2(head_dim))),
            GRID=grid,
            maxnreg=tiles.weights_registers,
            num_warps=tiles.weights_warps,
            num_stages=tiles.weights_stages,
        )
        attend_values_kernel[(blocks * parts * triton.cdiv(head_dim, columns), num_kv_heads)](
            v_pages,
            *where,
            weights_BKXML,
            scales_BKX2M,
            totals_BK3M,
            carried_TND,
            out_TND,
            num_seqs,
            part.first_tile,
            part.num_tiles,
            *strides,
            v_scale if k_pages.dtype == FP8 else None,
            **common,
            NUM_HEADS=num_heads,
            BLOCK_M=tiles.values_pairs,
            TILE_KEYS=part.tile_keys,
            BLOCK_L=min(part.tile_keys, tiles.values_keys),
            BLOCK_E=columns,
            PARTS=parts,
            maxnreg=tiles.values_registers,
            num_warps=tiles.values_warps,
            num_stages=tiles.values_stages,
        )


def rounds_of(
    most_keys: int, window: int | None, block_rows: int, chunk: int, key_bytes: int, weights_bytes: int
) -> list[Round]:
    """Rounds that cover what a block of rows may see; a tile has no more keys than the chunks in its round.

    Args:
        most_keys: keys of a sequence, at most.
        window: keys that a row sees.
        block_rows: rows of a block.
        chunk: keys of the smallest chunk; 0 where sums are not cut.
        key_bytes: weights of one key.
        weights_bytes: of a round, about.
    """
    if window is not None:
        keys = chunk or KEYS
        return [Round(0, min(triton.cdiv(most_keys, keys), (window + block_rows - 2) // keys + 2), keys)]
    rounds = []
    first = 0
    if chunk:
        small: int = min(SMALL_CHUNKS_END.value, triton.cdiv(most_keys, chunk) * chunk)
        rounds.append(Round(0, small // chunk, chunk))
        first = small
    length = max(1, weights_bytes // (key_bytes * ROUND_KEYS)) * ROUND_KEYS
    while first < most_keys:
        end = min((first // length + 1) * length, triton.cdiv(most_keys, KEYS) * KEYS)
        rounds.append(Round(first // KEYS, (end - first) // KEYS, KEYS))
        first = end
    return rounds
