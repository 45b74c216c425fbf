"""Attention of few rows of each sequence on Hopper: which kernel takes a call, if one does.

Decode and verify steps differ in what bounds them, and each kernel is for one kind: heads of 512 that see all keys
(`wide_attention`), and behind a window few programs (`few_attention`) or enough for the device (`whole_attention`).
Calls that none takes are attended as on any device (`paged_attention`).

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
D head dim.
"""

from __future__ import annotations

from torch import Tensor

from gemray_kernels.reference.keys_of_values import KeysOfValues
from gemray_kernels.triton.few_attention import attend_few, few_tile
from gemray_kernels.triton.whole_attention import attend_whole, serves_whole
from gemray_kernels.triton.wide_attention import attend_wide, is_wide


def attend_few_rows(
    q_TND: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table_SP: Tensor,
    query_start_Z: Tensor,
    kv_len_S: Tensor,
    out_TND: Tensor,
    *,
    window: int | None,
    causal: bool,
    scale: float,
    most_rows: int,
    keys_of_values: KeysOfValues | None,
    reader_comes_ahead: bool,
    scratch: Tensor | None,
) -> bool:
    """Attend by the kernel that is for such a call, and say whether there is one; it follows from the call's shape.

    Args:
        q_TND: as all but `out_TND` and `most_rows`, of `paged_attention`.
        out_TND: takes the result.
        most_rows: of a sequence that sees keys, at most.
    """
    num_seqs = len(kv_len_S)
    tables = (block_table_SP, query_start_Z, kv_len_S)
    if is_wide(
        q_TND,
        k_pages,
        num_seqs,
        window=window,
        causal=causal,
        most_rows=most_rows,
        keys_of_values=keys_of_values,
    ):
        attend_wide(
            q_TND,
            k_pages,
            v_pages,
            *tables,
            out_TND,
            scale=scale,
            most_rows=most_rows,
            keys_of_values=keys_of_values,
            scratch=scratch,
        )
        return True
    if window is None:
        return False
    tile = few_tile(q_TND, k_pages, num_seqs, window=window, causal=causal, most_rows=most_rows)
    if tile is not None:
        attend_few(
            q_TND,
            k_pages,
            v_pages,
            *tables,
            out_TND,
            tile,
            window=window,
            causal=causal,
            scale=scale,
            most_rows=most_rows,
            lets_at_once=reader_comes_ahead,
            scratch=scratch,
        )
        return True
    if serves_whole(q_TND, k_pages, v_pages, num_seqs, window=window, causal=causal, most_rows=most_rows):
        attend_whole(q_TND, k_pages, v_pages, *tables, out_TND, window=window, causal=causal, scale=scale)
        return True
    return False
