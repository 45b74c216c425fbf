"""Exact attention, the plain-PyTorch reference: each row and head alone, its keys in pieces of one shape.

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
K KV heads, D head dim, L keys of one chunk, B pairs of a row and a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemray_kernels.fp8_kv import check_scales
from gemray_kernels.precision import compute_dtype
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
    rows: list[tuple[int, list[_Seen]]] = []
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
            rows.append((starts[s] + row, [_Seen(chunks[number], first, position) for number in numbers]))
    if rows:
        rows.sort(key=lambda row: -len(row[1]))
        out_TND[[t for t, _ in rows]] = _attend(
            [q_TND[t] for t, _ in rows],
            [seen for _, seen in rows],
            q_TND.shape[1] // k_pages.shape[2],
            scale * k_scale,
            v_scale,
        )
    return out_TND


class _Chunk:
    """The keys and values of one chunk, by KV head, in the compute dtype; those behind the last key are zeros."""

    def __init__(self, k_pages: Tensor, v_pages: Tensor, block_table_P: Tensor, number: int, kv_len: int) -> None:
        self._key_L = torch.arange(number * CHUNK, (number + 1) * CHUNK, device=k_pages.device)
        place, page_size = self._key_L[: kv_len - number * CHUNK], k_pages.shape[1]
        self._slots = block_table_P[place // page_size].long() * page_size + place % page_size
        self._k, self._v = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
        self._by_head: dict[int, tuple[Tensor, Tensor]] = {}

    def hidden(self, first: int, last: int) -> Tensor:
        """Which keys a row does not see that sees keys `first` to `last`, bool [L]."""
        return (self._key_L < first) | (self._key_L > last)

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


class _Seen:
    """What one row sees of a chunk."""

    def __init__(self, chunk: _Chunk, first: int, last: int) -> None:
        self._chunk = chunk
        self.hidden_L = chunk.hidden(first, last)
        self._hides = bool(self.hidden_L.any())
        self._v_DL: dict[int, Tensor] = {}

    def scores(self, q_D: Tensor, kv_head: int) -> Tensor:
        """A query's products with all keys, hidden ones included [L]."""
        return torch.mv(self._chunk.keys_and_values(kv_head, q_D.dtype)[0], q_D)

    def values(self, weight_L: Tensor, kv_head: int) -> Tensor:
        """The weighted sum of the values [D]."""
        if kv_head not in self._v_DL:
            _, v_DL = self._chunk.keys_and_values(kv_head, weight_L.dtype)
            # 0 · NaN is NaN
            self._v_DL[kv_head] = v_DL.masked_fill(self.hidden_L, 0.0) if self._hides else v_DL
        return torch.mv(self._v_DL[kv_head], weight_L)


def _attend(
    queries: Sequence[Tensor], seen: Sequence[Sequence[_Seen]], heads_per_kv_head: int, scale: float, v_scale: float
) -> Tensor:
    """Rows of [N, D] over what each sees, of which the first row sees most chunks and the last fewest: [rows, N, D].

    Products are made by row, head and chunk, each a call of one shape. The rest of a chunk is done for all rows and
    heads at once: it adds or compares nothing across them.
    """
    num_heads, head_dim = queries[0].shape
    kv_heads = [head // heads_per_kv_head for head in range(num_heads)]
    dtype = compute_dtype(queries[0].dtype)
    # Each where a tensor begins: where in memory that is must not matter.
    wide = [q_D.clone().to(dtype) for q_ND in queries for q_D in q_ND]
    largest_B = queries[0].new_full((len(wide),), -torch.inf, dtype=dtype)
    total_B, out_BD = torch.zeros_like(largest_B), largest_B.new_zeros(len(wide), head_dim)
    for number in range(len(seen[0])):
        parts = [of_row[number] for of_row in seen if number < len(of_row)]
        pairs = [(part, kv_head) for part in parts for kv_head in kv_heads]
        here = slice(len(pairs))
        score_BL = torch.stack([part.scores(q_D, kv_head) for (part, kv_head), q_D in zip(pairs, wide, strict=False)])
        hidden_BL = torch.stack([part.hidden_L for part in parts]).repeat_interleave(num_heads, dim=0)
        score_BL = (score_BL * scale).masked_fill(hidden_BL, -torch.inf)
        highest_B = score_BL.amax(dim=-1)
        weight_BL = torch.exp(score_BL - highest_B[:, None]).to(queries[0].dtype).to(dtype)
        value_BD = torch.stack(
            [part.values(weight_L, kv_head) for (part, kv_head), weight_L in zip(pairs, weight_BL, strict=True)]
        )
        new_largest_B = torch.maximum(largest_B[here], highest_B)
        of_total_B, of_chunk_B = torch.exp(largest_B[here] - new_largest_B), torch.exp(highest_B - new_largest_B)
        total_B[here] = total_B[here] * of_total_B + weight_BL.sum(dim=-1) * of_chunk_B
        out_BD[here] = out_BD[here] * of_total_B[:, None] + value_BD * of_chunk_B[:, None]
        largest_B[here] = new_largest_B
    out_BD = out_BD / total_B[:, None] * v_scale
    return out_BD.view(len(queries), num_heads, head_dim).to(queries[0].dtype)
