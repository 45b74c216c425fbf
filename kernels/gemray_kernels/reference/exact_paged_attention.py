"""Exact attention, the plain-PyTorch reference, by elementwise operations alone, as of `exact_linear`.

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
K KV heads, G = N / K query heads a KV head, D head dim, L keys of one chunk, C chunks, R rows, R1 and the like an axis
that is broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_kernels.fp8_kv import check_scales
from gemray_kernels.precision import compute_dtype
from gemray_kernels.reference.exact_linear import MOST_PRODUCTS, sum_by_halves
from gemray_kernels.reference.keys_of_values import KeysOfValues
from gemray_kernels.reference.paged_attention import check_announced

CHUNK = 64
"""Keys of a chunk."""


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
) -> Tensor:
    """Softmax attention [T, N, D] whose rows have bits that depend on nothing but the row's query, keys and position.

    A row's keys are cut into chunks of `CHUNK` keys at multiples of `CHUNK`, padded with zeros; chunks are added in
    their order. Arguments and masks as of `paged_attention`.

    Raises:
        ValueError: `causal` is False: what a row of a block sees then depends on the block.
    """
    if not causal:
        raise ValueError("causal is False; only causal attention is exact")
    check_scales(k_pages, k_scale, v_scale)
    out_TND = torch.zeros_like(q_TND)
    starts, kv_lens = query_start_Z.tolist(), kv_len_S.tolist()
    rows: list[_Row] = []
    chunks: dict[tuple[int, int], int] = {}
    for s, kv_len in enumerate(kv_lens):
        num_rows = starts[s + 1] - starts[s]
        if num_rows and most_rows is not None and kv_len and num_rows > most_rows:
            raise ValueError(f"sequence {s} has {num_rows} rows; at most {most_rows} were announced")
        check_announced(s, num_rows, kv_len, most_keys)
        for row in range(num_rows):
            position = kv_len - num_rows + row
            if position < 0:
                continue
            first = 0 if window is None else max(0, position - window + 1)
            numbers = range(first // CHUNK, position // CHUNK + 1)
            places = [chunks.setdefault((s, number), len(chunks)) for number in numbers]
            rows.append(_Row(starts[s] + row, first, position, numbers.start, places))
    if not rows:
        return out_TND
    # Rows of later chunks lie before those that have none.
    rows.sort(key=lambda row: -len(row.chunks))
    wide = compute_dtype(q_TND.dtype)
    k_DCKL, v_LCKD = _read(list(chunks), k_pages, v_pages, block_table_SP, kv_lens, wide)
    _, num_heads, head_dim = q_TND.shape
    most = max(1, MOST_PRODUCTS // (num_heads * CHUNK * head_dim))
    for begin in range(0, len(rows), most):
        some = rows[begin : begin + most]
        places = [row.place for row in some]
        out_TND[places] = _attend(q_TND[places], some, k_DCKL, v_LCKD, scale * k_scale, v_scale)
    return out_TND


@dataclass(frozen=True)
class _Row:
    """One row and what it sees."""

    place: int
    """Among all rows."""
    first: int
    last: int
    """The keys that it sees."""
    first_chunk: int
    chunks: Sequence[int]
    """Where its chunks lie, from that number on."""


def _read(
    chunks: Sequence[tuple[int, int]],
    k_pages: Tensor,
    v_pages: Tensor,
    block_table_SP: Tensor,
    kv_lens: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Keys [D, C, K, L] and values [L, C, K, D] of chunks, (sequence, number) each, in `dtype`; those behind the last
    key are zeros."""
    device, page_size = block_table_SP.device, k_pages.shape[1]
    sequence_C, first_C, end_C = torch.tensor(
        [(s, number * CHUNK, kv_lens[s]) for s, number in chunks], device=device
    ).unbind(1)
    position_LC = first_C + torch.arange(CHUNK, device=device)[:, None]
    is_none_LC11 = (position_LC >= end_C)[:, :, None, None]
    position_LC = torch.minimum(position_LC, end_C - 1)
    place_LC = block_table_SP[sequence_C, position_LC // page_size].long() * page_size + position_LC % page_size
    k_LCKD, v_LCKD = (
        pages.flatten(0, 1)[place_LC].to(dtype).masked_fill_(is_none_LC11, 0.0) for pages in (k_pages, v_pages)
    )
    return k_LCKD.permute(3, 1, 2, 0).contiguous(), v_LCKD


def _attend(
    q_RND: Tensor, rows: Sequence[_Row], k_DCKL: Tensor, v_LCKD: Tensor, scale: float, v_scale: float
) -> Tensor:
    """Rows [R, N, D] over what each sees, of which the first sees most chunks and the last fewest."""
    num_rows, num_heads, head_dim = q_RND.shape
    num_kv_heads, device, dtype = k_DCKL.shape[2], q_RND.device, k_DCKL.dtype
    q_DRKG1 = q_RND.to(dtype).view(num_rows, num_kv_heads, -1, head_dim).permute(3, 0, 1, 2).contiguous().unsqueeze(-1)
    key_L = torch.arange(CHUNK, device=device)
    largest_RN = total_RN = out_RND = q_DRKG1.new_empty(0)
    for number in range(len(rows[0].chunks)):
        here = [row for row in rows if number < len(row.chunks)]
        bounds = [(row.chunks[number], row.first, row.last, (row.first_chunk + number) * CHUNK) for row in here]
        chunk_R, first_R, last_R, start_R = torch.tensor(bounds, device=device).unbind(1)
        key_RL = start_R[:, None] + key_L
        hidden_RL = (key_RL < first_R[:, None]) | (key_RL > last_R[:, None])
        k_DRK1L = k_DCKL.index_select(1, chunk_R).unsqueeze(3)
        score_RNL = sum_by_halves(q_DRKG1[:, : len(here)] * k_DRK1L).view(len(here), num_heads, CHUNK)
        score_RNL = (score_RNL * scale).masked_fill(hidden_RL[:, None], -torch.inf)
        highest_RN = score_RNL.amax(dim=-1)
        weight_RNL = torch.exp(score_RNL - highest_RN[..., None]).to(q_RND.dtype).to(dtype)
        weight_LRKG1 = weight_RNL.permute(2, 0, 1).reshape(CHUNK, len(here), num_kv_heads, -1, 1)
        # 0 · NaN is NaN
        v_LRKD = v_LCKD.index_select(1, chunk_R).masked_fill_(hidden_RL.t()[..., None, None], 0.0)
        value_RND = sum_by_halves(weight_LRKG1 * v_LRKD.unsqueeze(3)).view(len(here), num_heads, head_dim)
        if number == 0:
            largest_RN, total_RN, out_RND = highest_RN, weight_RNL.sum(dim=-1), value_RND
            continue
        earlier = largest_RN[: len(here)], total_RN[: len(here)], out_RND[: len(here)]
        new_largest_RN = torch.maximum(earlier[0], highest_RN)
        of_total_RN, of_chunk_RN = torch.exp(earlier[0] - new_largest_RN), torch.exp(highest_RN - new_largest_RN)
        earlier[0].copy_(new_largest_RN)
        earlier[1].copy_(earlier[1] * of_total_RN + weight_RNL.sum(dim=-1) * of_chunk_RN)
        earlier[2].copy_(earlier[2] * of_total_RN[..., None] + value_RND * of_chunk_RN[..., None])
    return (out_RND / total_RN[..., None] * v_scale).to(q_RND.dtype)
