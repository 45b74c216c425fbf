"""Storing keys and values in pages.

Shape legend: T rows, N KV heads, D head dim; pages are [pages, page_size, N, D].
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.fp8_kv import FP8, check_scales, to_fp8


def write_kv(
    k_TND: Tensor,
    v_TND: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    kv_index_T: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Put row t's K and V at index ``kv_index_T[t] = page · page_size + offset``, in place.

    Rows that share an index (only ever in the null page) leave one of their values there. The scales are of pages that
    hold 8-bit floats (`gemray_kernels.fp8_kv`), to which the rows are then rounded.
    """
    check_scales(k_pages, k_scale, v_scale)
    for rows, pages, scale in ((k_TND, k_pages, k_scale), (v_TND, v_pages, v_scale)):
        flat = pages.view(-1, *pages.shape[2:])
        if pages.dtype == FP8:
            flat.view(torch.uint8)[kv_index_T] = to_fp8(rows, scale).view(torch.uint8)
        else:
            flat[kv_index_T] = rows
