"""Exact attention, the plain-PyTorch reference: each row and head alone, its keys in pieces of one shape.

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
K KV heads, D head dim, L keys of one chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.fp8_kv import check_scales
from gemray_kernels.precision import compute_dtype
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
) -> Tensor:
    """Softmax attention [T, N, D] whose rows have bits that depend on nothing but the row's query, keys and position.

    A row's keys are cut into chunks of `CHUNK` keys at multiples of `CHUNK`, each of which is multiplied with one query
    alone, padded with zeros; chunks are added in their order. Arguments and masks as of `paged_attention`.

    Raises:
        ValueError: `causal` is False: what a row of a block sees then depends on the block.
    """
    if not causal:
        raise ValueError("causal is False; only causal attention is exact")
    check_scales(k_pages, k_scale, v_scale)
    out_TND = torch.zeros_like(q_TND)
    starts, kv_lens = query_start_Z.tolist(), kv_len_S.tolist()
    for s, kv_len in enumerate(kv_lens):
        num_rows = starts[s + 1] - starts[s]
        if num_rows and most_rows is not None and kv_len and num_rows > most_rows:
            raise ValueError(f"sequence {s} has {num_rows} rows; at most {most_rows} were announced")
        check_announced(s, num_rows, kv_len, most_keys)
        chunks: dict[int, _Chunk] = {}
        for row in range(num_rows):
            position = kv_len - num_rows + row
            if position < 0:
                continue
            first = 0 if window is None else max(0, position - window + 1)
            numbers = range(first // CHUNK, position // CHUNK + 1)
            for number in numbers:
                if number not in chunks:
                    chunks[number] = _Chunk(k_pages, v_pages, block_table_SP[s], number, kv_len)
            seen = [(chunks[number], chunks[number].hidden(first, position)) for number in numbers]
            for head in range(q_TND.shape[1]):
                kv_head = head // (q_TND.shape[1] // k_pages.shape[2])
                q_D = q_TND[starts[s] + row, head].clone()  # where it begins in memory must not matter
                out_D = _attend(q_D, seen, kv_head, scale * k_scale)
                out_TND[starts[s] + row, head] = (out_D * v_scale).to(q_TND.dtype)
    return out_TND


class _Chunk:
    """The keys and values of one chunk, by KV head, in the compute dtype; those behind the last key are zeros."""

    def __init__(self, k_pages: Tensor, v_pages: Tensor, block_table_P: Tensor, number: int, kv_len: int) -> None:
        self._key_L = torch.arange(number * CHUNK, (number + 1) * CHUNK, device=k_pages.device)
        place, page_size = self._key_L[: kv_len - number * CHUNK], k_pages.shape[1]
        self._slots = block_table_P[place // page_size].long() * page_size + place % page_size
        self._k, self._v = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
        self._by_head: dict[int, tuple[Tensor, Tensor]] = {}

    def hidden(self, first: int, last: int) -> Tensor | None:
        """Which keys a row does not see that sees keys `first` to `last`, bool [L]; None when it sees all of them."""
        hidden_L = (self._key_L < first) | (self._key_L > last)
        return hidden_L if hidden_L.any() else None

    def keys_and_values(self, kv_head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [L, D] and values [D, L], contiguous."""
        if kv_head not in self._by_head:
            k_LD, v_LD = (
                torch.zeros(CHUNK, pages.shape[2], dtype=dtype, device=pages.device) for pages in (self._k, self._v)
            )
            k_LD[: len(self._slots)] = self._k[self._slots, kv_head].to(dtype)
            v_LD[: len(self._slots)] = self._v[self._slots, kv_head].to(dtype)
            self._by_head[kv_head] = k_LD, v_LD.t().contiguous()
        return self._by_head[kv_head]


def _attend(q_D: Tensor, seen: list[tuple[_Chunk, Tensor | None]], kv_head: int, scale: float) -> Tensor:
    """One head of a row over chunks, each with the keys [L] that are hidden in it; in the compute dtype."""
    dtype = compute_dtype(q_D.dtype)
    q_wide_D = q_D.to(dtype)
    largest = torch.full((), -torch.inf, dtype=dtype, device=q_D.device)
    total, out_D = torch.zeros_like(largest), torch.zeros_like(q_wide_D)
    for chunk, hidden_L in seen:
        k_LD, v_DL = chunk.keys_and_values(kv_head, dtype)
        score_L = torch.mv(k_LD, q_wide_D) * scale
        if hidden_L is not None:
            score_L = score_L.masked_fill(hidden_L, -torch.inf)
            v_DL = v_DL.masked_fill(hidden_L, 0.0)  # 0 · NaN is NaN
        highest = score_L.max()
        weight_L = torch.exp(score_L - highest).to(q_D.dtype).to(dtype)
        new_largest = torch.maximum(largest, highest)
        of_total, of_chunk = torch.exp(largest - new_largest), torch.exp(highest - new_largest)
        total = total * of_total + weight_L.sum() * of_chunk
        out_D = out_D * of_total + torch.mv(v_DL, weight_L) * of_chunk
        largest = new_largest
    return out_D / total
