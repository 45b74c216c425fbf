"""Attention's inputs of many rows at one time beside those of small calls: the bits must be the same."""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.table import REFERENCE, Kernels

SHAPES = {"31B sliding": (32, 16, 256), "31B full": (32, 4, 512), "E2B": (8, 1, 256), "odd": (6, 3, 64)}
"""Query heads, KV heads and head dim."""


def numbers_of_rows(
    kernels: Kernels, device: str, dtype: torch.dtype, *, rows: int, shape: str, has_v: bool, few: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Queries, keys and values: of one call, of calls of `few` rows, and of the reference in float64."""
    heads, kv_heads, head_dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(12)
    summands_STO = torch.randn(1, rows, (heads + (2 if has_v else 1) * kv_heads) * head_dim, generator=generator)
    summands_STO = summands_STO.to(device, dtype)
    angle = (torch.rand(rows, 1, head_dim, generator=generator) * 6).to(device)
    cos_T1D, sin_T1D = angle.cos().to(dtype), angle.sin().to(dtype)
    weights = [torch.randn(head_dim, generator=generator).to(device, dtype) for _ in range(2)]
    index_T = (torch.randperm(rows, generator=generator) + 16).to(device)

    def call(used: Kernels, wide: torch.dtype, step: int) -> list[Tensor]:
        pages = torch.zeros(2, 2 + rows // 16, 16, kv_heads, head_dim, device=device, dtype=wide)
        q_norm, k_norm = (Norm(weight.to(wide), 1e-6) for weight in weights)
        queries = []
        for first in range(0, rows, step):
            part = slice(first, first + step)
            write = KVWrite(k_norm, not has_v, pages[0], pages[1], index_T[part])
            angles = cos_T1D[part].to(wide), sin_T1D[part].to(wide)
            queries.append(
                used.attention_inputs(summands_STO[:, part].to(wide).contiguous(), *angles, heads, q_norm, write)
            )
        return [torch.cat(queries), pages[0], pages[1]]

    return call(kernels, dtype, rows), call(kernels, dtype, few), call(REFERENCE, torch.float64, rows)
