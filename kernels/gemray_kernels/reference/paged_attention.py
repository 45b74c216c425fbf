"""Attention of ragged rows over paged keys and values: the plain-PyTorch reference.

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
K KV heads, G = N / K query heads a KV head, D head dim, Q rows of one sequence, L keys that it reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.fp8_kv import FP8, check_scales
from gemray_kernels.precision import compute_dtype
from gemray_kernels.reference.keys_of_values import KeysOfValues

FEW_ROWS = 32
"""What decode and verify steps have of one sequence, at most."""


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
) -> Tensor:
    """Softmax attention [T, N, D] in `q`'s dtype; scores and softmax in the compute dtype.

    Row i of the Q rows of a sequence is the query at position ``kv_len - Q + i``: masks are aligned to the last key.
    It sees key j iff ``j < kv_len``, and ``j <= position`` when `causal`, and ``j > position - window`` when there is
    a window. Query head n reads KV head ``n // (N / K)``. Rows that see no key give zeros. Pages whose keys no row
    sees are not read.

    Args:
        q_TND: queries, after RoPE.
        k_pages: [pages, page_size, K, D].
        v_pages: as `k_pages`.
        block_table_SP: integer; page of position p of sequence s is ``block_table[s, p // page_size]``.
        query_start_Z: integer [S + 1], cumulative rows.
        kv_len_S: integer, keys of each sequence.
        window: keys a query sees, itself included; None for no limit.
        causal: hide keys behind the query.
        scale: multiplies the scores (1.0 in Gemma 4).
        most_rows: rows of a sequence that sees keys, at most, as far as the host knows: `FEW_ROWS` or fewer spare a
            kernel.
        most_keys: keys of a sequence of more than `FEW_ROWS` rows, at most, as far as the host knows.
        k_scale: multiplies the keys, where pages hold 8-bit floats (`gemray_kernels.fp8_kv`).
        v_scale: as `k_scale`, of the values.
        keys_of_values: how keys follow from values, where they do. A kernel may then read values for keys; this one
            reads the keys.
        reader_comes_ahead: whether the kernel that reads the result asks for its weight before it waits. The last of
            attention's kernels may then let it start as soon as it has itself.
    """
    check_scales(k_pages, k_scale, v_scale)
    out_TND = torch.zeros_like(q_TND)
    starts, kv_lens = query_start_Z.tolist(), kv_len_S.tolist()
    for s, kv_len in enumerate(kv_lens):
        rows = slice(starts[s], starts[s + 1])
        num_rows = rows.stop - rows.start
        if num_rows == 0 or kv_len == 0:
            continue
        if most_rows is not None and num_rows > most_rows:
            raise ValueError(f"sequence {s} has {num_rows} rows; at most {most_rows} were announced")
        check_announced(s, num_rows, kv_len, most_keys)
        first_key = 0 if window is None else max(0, kv_len - num_rows - window + 1)
        keys = _Keys(block_table_SP[s], first_key, kv_len)
        out_TND[rows] = _attend(
            q_TND[rows],
            keys.gather(k_pages),
            keys.gather(v_pages),
            _visible(num_rows, first_key, kv_len, window=window, causal=causal, device=q_TND.device),
            scale * k_scale,
            v_scale,
        )
    return out_TND


def check_announced(sequence: int, num_rows: int, kv_len: int, most_keys: int | None) -> None:
    """Raise ValueError where a sequence of many rows has more keys than were announced: faster kernels would skip
    some."""
    if most_keys is not None and num_rows > FEW_ROWS and kv_len > most_keys:
        raise ValueError(f"sequence {sequence} has {kv_len} keys; at most {most_keys} were announced")


class _Keys:
    """The indices of a sequence's keys ``first <= j < end``."""

    def __init__(self, block_table_P: Tensor, first: int, end: int) -> None:
        self._block_table_P = block_table_P
        self._first = first
        self._end = end

    def gather(self, pages: Tensor) -> Tensor:
        """The keys or values [L, K, D] in order of position."""
        page_size = pages.shape[1]
        first_page = self._first // page_size
        numbers = self._block_table_P[first_page : -(-self._end // page_size)]
        skipped = first_page * page_size
        return pages[numbers.long()].flatten(0, 1)[self._first - skipped : self._end - skipped]


def _visible(
    num_rows: int, first_key: int, kv_len: int, *, window: int | None, causal: bool, device: torch.device
) -> Tensor | None:
    """Which keys each row sees, bool [Q, L]; None when every row sees all of them."""
    if num_rows == 1 or (not causal and window is None):
        return None  # a lone row's keys were chosen by its window, and it is the last position
    position_Q1 = torch.arange(kv_len - num_rows, kv_len, device=device).unsqueeze(1)
    key_L = torch.arange(first_key, kv_len, device=device)
    visible_QL = torch.ones(num_rows, kv_len - first_key, dtype=torch.bool, device=device)
    if causal:
        visible_QL &= key_L <= position_Q1
    if window is not None:
        visible_QL &= key_L > position_Q1 - window
    return visible_QL


def _attend(
    q_QND: Tensor, k_LKD: Tensor, v_LKD: Tensor, visible_QL: Tensor | None, scale: float, v_scale: float
) -> Tensor:
    num_rows, num_heads, head_dim = q_QND.shape
    num_kv_heads = k_LKD.shape[1]
    wide = compute_dtype(q_QND.dtype)
    # One matrix product a KV head: its G query heads and the Q rows together are the rows.
    q_KRD = q_QND.view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores_KRL = torch.matmul(q_KRD.to(wide), k_LKD.permute(1, 2, 0).to(wide)) * scale
    if visible_QL is not None:
        hidden_RL = ~visible_QL.repeat(num_heads // num_kv_heads, 1)
        scores_KRL = scores_KRL.masked_fill(hidden_RL, -torch.inf)
    weights_KRL = torch.softmax(scores_KRL, dim=-1)
    if visible_QL is not None:
        weights_KRL = weights_KRL.masked_fill(hidden_RL, 0.0)  # a row that sees nothing: softmax gave NaN
    weights_KRL = weights_KRL.to(q_QND.dtype)
    if v_LKD.dtype == FP8:
        o_KRD = torch.matmul(weights_KRL.to(wide), v_LKD.permute(1, 0, 2).to(wide)) * v_scale
        o_KRD = o_KRD.to(q_QND.dtype)  # rounded once, behind the scale
    else:
        o_KRD = torch.matmul(weights_KRL, v_LKD.permute(1, 0, 2))
    return o_KRD.view(num_kv_heads, -1, num_rows, head_dim).permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)
