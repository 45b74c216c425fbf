"""Chunks and tiles of paged attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from decode_kernels.measure import CACHE_BYTES, CEILING, DEVICE, Report, early, error, median_us, poisoned, random
from gemray_kernels.fp8_kv import to_fp8
from gemray_kernels.reference.paged_attention import paged_attention
from gemray_kernels.triton import paged_attention as module

KERNEL: Callable[..., Tensor] = module.paged_attention
REFERENCE: Callable[..., Tensor] = paged_attention
BATCHES = [(1, 1, 640), (8, 1, 640), (1, 5, 640), (8, 5, 640), (8, 16, 640), (8, 1, 4000)]
"""(sequences, rows of each, keys of each)"""


@dataclass(frozen=True)
class Heads:
    """The attention of one kind of layer."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    window: int | None


GROUPS = (
    Heads("31B sliding", 32, 16, 256, 1024),
    Heads("31B full", 32, 4, 512, None),
    Heads("E4B sliding", 8, 2, 256, 512),
    Heads("DFlash", 64, 8, 128, 2048),
)


def attention(report: Report) -> None:
    """Time chunks and tiles of each kind of layer in each batch; only a DFlash block has 16 rows."""
    for group in GROUPS:
        for batch, rows, context in BATCHES:
            if (group.name == "DFlash") == (rows == 16):
                sweep(report, group, batch, rows, context)


def sweep(report: Report, group: Heads, batch: int, rows: int, context: int) -> None:
    """Time one batch, and check the kernel's own choice."""
    sets = list(inputs(group, batch, rows, context))
    known: dict[str, Any] = {"most_rows": rows}
    found = {"rows unknown": attention_us(group, sets), "rows known": attention_us(group, sets, **known)}
    found["early"] = attention_us(group, sets, on=True, **known)
    for chunk in (64, 128):
        with mock.patch.object(module, "MIN_CHUNK", chunk):
            found[f"chunks of {chunk}"] = attention_us(group, sets, **known)
    for pairs, keys, warps, stages in [(16, 32, 4, 2), (16, 64, 8, 2), (16, 128, 8, 1)]:
        tile = module.Tile(max(pairs, group.heads // group.kv_heads), keys, warps, stages)
        try:
            found[f"{pairs} {keys} {warps} {stages}"] = attention_us(group, sets, tile=tile, **known)
        except Exception as reason:
            report.refused(tile, reason)
    eight = [(q_TND, to_fp8(k_pages, 1.0), to_fp8(v_pages, 1.0), *rest) for q_TND, k_pages, v_pages, *rest in sets]
    found["8-bit pages"] = attention_us(group, eight, **known)
    tile = module.Tile(max(16, group.heads // group.kv_heads), 64, 8, 2)
    found["8-bit pages, 64 keys"] = attention_us(group, eight, tile=tile, **known)
    with poisoned():
        got = KERNEL(*sets[0], **keywords(group), **known)
    wide = [a.double() if a.is_floating_point() else a for a in sets[0]]
    if not (wrong := error(got, REFERENCE(*wide, **keywords(group)))) < 1e-2:
        report.fault(f"attention {group.name} {batch} x {rows} over {context}: error {wrong}")
    seen = context if group.window is None else min(context, group.window + rows - 1)
    floor = batch * seen * group.kv_heads * group.dim * 4 / CEILING * 1e6
    text = ", ".join(f"{k}: {v:.1f}" for k, v in sorted(found.items(), key=lambda item: item[1])[:7])
    report.row(
        "attention",
        f"attention {group.name}, {batch} x {rows}, {context} keys: floor {floor:.1f}, "
        f"rows known {found['rows known']:.1f}, over 8-bit pages {found['8-bit pages']:.1f}; {text}",
        name=group.name,
        batch=batch,
        rows=rows,
        context=context,
        floor=floor,
        found=found,
    )


def keywords(group: Heads) -> dict[str, Any]:
    """What the reference and the kernel are both told."""
    return {"window": group.window, "causal": True, "scale": 1.0}


def attention_us(group: Heads, sets: Sequence[tuple[Tensor, ...]], *, on: bool = False, **more: Any) -> float:
    """Microseconds of one call."""
    with early(on):
        return median_us([partial(KERNEL, *a, **keywords(group), **more) for a in sets])


def inputs(group: Heads, batch: int, rows: int, context: int) -> Iterator[tuple[Tensor, ...]]:
    """Arguments over pages of their own, as many as exceed the cache together."""
    pages_each = -(-context // 16)
    read = batch * context * group.kv_heads * group.dim * 4
    for _ in range(max(2, min(12, 3 * CACHE_BYTES // read + 1))):
        k_pages, v_pages = (random(1 + batch * pages_each, 16, group.kv_heads, group.dim) for _ in range(2))
        table_SP = torch.zeros(batch, 512, device=DEVICE, dtype=torch.int32)
        table_SP[:, :pages_each] = (torch.randperm(batch * pages_each, device=DEVICE) + 1).view(batch, pages_each)
        yield (
            random(batch * rows, group.heads, group.dim, gain=1.5 / group.dim**0.5),
            k_pages,
            v_pages,
            table_SP,
            torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * rows,
            torch.full((batch,), context, device=DEVICE, dtype=torch.int32),
        )
