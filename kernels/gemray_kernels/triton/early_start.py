"""Kernels that start while the kernel before them still runs (programmatic dependent launch, compute capability 9.0).

A kernel that starts early may read weights and nothing else until it has waited: every other tensor may still be
written by kernels before it. Waiting is for the kernel before alone, which has waited itself: so when a kernel has
waited, all before it have ended.

What was written before the last anchor (below) it may read, too, but not through its multiprocessor's own cache
(`load_older`): nothing promises that this holds what was written last before the kernel has waited
(`benchmarks/results/2026-12-01-h200-verify-ahead`).

Most let the next kernel start when they have waited: anchors. Before the next one starts, everything before an anchor
has been written. Others let it start at once, so that several kernels may be under way:

- Attention's kernels but for the last, and what makes attention's inputs. Their programs take their places and read
  tables, some also keys of earlier steps, while the product before attention still runs: what they read before they
  wait was written before the last anchor. So does the last of few programs' kernels, if a product is behind it that
  asks for its weight before it waits (`benchmarks/results/2026-11-30-h200-placement`).
- Products that ask for weights ahead (`linear_ahead`, `packed_ahead`, `packed_columns`), but of plain weights only the
  parts that norms, gates and attention's inputs add up: gated ones, `linear` and `wide_summands` anchor.
- Norms, if the product behind them is one of plain weights that asks for its weight ahead
  (`gemray_kernels.product_starts`).

So a layer has an anchor: its gated product, or, if that is packed, the norm before it.

Not every kernel gains by an early start: layers of packed weights are slower with products that start early, but for
gated ones (`benchmarks/results/2026-11-30-h200-starts`), and all layers with products of many programs that ask for
weights by `prefetch` before they wait (`2026-11-29-h200-late-products`); some gain by a ring that is filled before
(`packed_ahead`, `2026-11-30-h200-packed-clocks`), of plain weights nearly all (`linear_ahead`,
`2026-11-30-h200-plain-ahead`). One that starts late lets the next one start at once: what it needs has been written.

A kernel is told which it does: `EARLY`, it starts early and waits, or `LATE`, it does not where others do. It is
neither on devices without early starts.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor


def starts_early(x: Tensor) -> bool:
    """Whether kernels on the device of `x` may start early."""
    return x.is_cuda and _capability(x.device.index) >= (9, 0)


def on_hopper(x: Tensor) -> bool:
    """Whether the device of `x` is of compute capability 9.0, whose instructions some kernels are written in."""
    return x.is_cuda and _capability(x.device.index) == (9, 0)


@lru_cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_inputs(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """From here on everything that earlier kernels wrote may be read, and the next kernel may start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def load_older(pointer, mask=None, other=None):  # type: ignore[no-untyped-def]
    """Load, before waiting, what was written before the last anchor: from the cache that all multiprocessors share."""
    return tl.load(pointer, mask=mask, other=other, cache_modifier=".cg")


@triton.jit  # type: ignore[untyped-decorator]
def let_next_start(AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """In a kernel that is LATE, or is EARLY and has yet to wait: from here on the next one may start."""
    if AT_ONCE:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def wait_having_let(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `wait_for_inputs` in a kernel that has let the next one start before."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
