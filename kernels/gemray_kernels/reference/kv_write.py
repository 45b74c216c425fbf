"""Storing keys and values in pages.

Shape legend: T rows, N KV heads, D head dim; pages are [pages, page_size, N, D].
"""

from __future__ import annotations

from torch import Tensor


def write_kv(k_TND: Tensor, v_TND: Tensor, k_pages: Tensor, v_pages: Tensor, kv_index_T: Tensor) -> None:
    """Put row t's K and V at index ``kv_index_T[t] = page · page_size + offset``, in place.

    Rows that share an index (only ever in the null page) leave one of their values there.
    """
    for rows, pages in ((k_TND, k_pages), (v_TND, v_pages)):
        pages.view(-1, *pages.shape[2:])[kv_index_T] = rows
