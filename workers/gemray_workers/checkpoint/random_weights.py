"""Seeded random weights in place of a checkpoint's: a model of a published shape in seconds, for measurements.

Values are made on the device, block by block, each block from a seed of its own (tensor name, block number): a rank
makes only the blocks that it keeps a part of, and ranks of any number hold slices of the same whole tensors. Values
depend on the kind of device, as its generator does, and not on the dtype, into which they are rounded.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from math import prod, sqrt

import torch
from torch import Tensor

from gemray_workers.checkpoint.loader import LoadReport, ProgressFn
from gemray_workers.checkpoint.target import Copy, WeightTarget, settle
from gemray_workers.checkpoint.vocabulary import HEAD_WEIGHT

BLOCK_ELEMENTS = 1 << 24
"""About how many values one block has: whole rows, at least one."""

RANDOM_FLOAT_SPREAD = 16.0
"""Standard deviation of random 8-bit floats: far from where they underflow, far below their end at 448."""

_VECTOR_CENTERS = (("q_norm", 0.25), ("k_norm", 0.25))
"""Norms that are not around 1: without a 1/sqrt(D) in attention these keep its scores around 1."""
_TABLE_GAIN = 0.25
"""Below 1, or the residual stream would remember its token so well that greedy text repeats it for ever."""
_ROUTER_SPREAD = 2.0
"""Spread of a router's logits, whose input has norm 1. Less, and every choice of experts would be a near tie."""


def random_weights(
    directory: str | os.PathLike[str],
    targets: Iterable[WeightTarget],
    *,
    prefix: str,
    is_ignored: Callable[[str], bool],
    progress: ProgressFn | None = None,
) -> LoadReport:
    """Fill the targets' destinations; `load_weights` of a checkpoint that needs no files.

    Args:
        directory: not read; a drafter's and a target's tensors differ by name.
        targets: every tensor of the model.
        prefix: what stands before the targets' names on disk.
        is_ignored: not asked.
        progress: called after each tensor with bytes of the destinations.
    """
    started = time.monotonic()
    wanted = list(targets)
    total = sum(_bytes_kept(target) for target in wanted)
    done = 0
    for target in wanted:
        for copy in target.copies:
            if target.role == "scale":
                copy.destination.fill_(target.random_value)
            else:
                _fill(target.full_name(prefix), target.shape, copy, is_codes=target.role == "codes")
        done += _bytes_kept(target)
        if progress is not None:
            progress(done, total)
    settling_s = settle(wanted)
    return LoadReport(len(wanted), done, time.monotonic() - started, settling_s, ())


def packed_gain(name: str, num_in: int) -> float:
    """What a packed layer's weights are larger by than those of variance 1 / inputs: a router's, as plain ones are."""
    return _ROUTER_SPREAD * sqrt(num_in) if name.endswith("router.proj") else 1.0


def _bytes_kept(target: WeightTarget) -> int:
    return sum(copy.destination.nbytes for copy in target.copies)


@torch.no_grad()
def _fill(name: str, shape: tuple[int, ...], copy: Copy, *, is_codes: bool) -> None:
    if not shape:
        shape, copy = (1,), Copy((slice(0, 1),), copy.destination.view(1))
    rows, *columns = copy.source
    for start, block in _blocks(name, shape, rows, copy.destination, is_codes=is_codes):
        first, last = max(start, rows.start), min(start + len(block), rows.stop)
        part = block[(slice(first - start, last - start), *columns)]
        copy.destination[first - rows.start : last - rows.start].copy_(part)


def _blocks(
    name: str, shape: tuple[int, ...], rows: slice, like: Tensor, *, is_codes: bool
) -> Iterator[tuple[int, Tensor]]:
    """(first row, values) of each block of the whole tensor that `rows` touches."""
    if not is_codes and not like.is_floating_point():
        # Integers are an order of things (the centroid head's vocabulary): a permutation, made whole.
        yield 0, torch.randperm(shape[0], generator=_generator(name, 0, like.device), device=like.device)
        return
    step = max(1, BLOCK_ELEMENTS // prod(shape[1:]))
    for number in range(rows.start // step, -(-rows.stop // step)):
        start = number * step
        size = (min(step, shape[0] - start), *shape[1:])
        if is_codes:
            yield start, _codes(size, like.dtype, _generator(name, number, like.device))
            continue
        noise = torch.empty(size, dtype=torch.float32, device=like.device)
        noise.normal_(generator=_generator(name, number, like.device))
        yield start, _scaled(name, noise)


def _codes(size: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any bits, or numbers of `RANDOM_FLOAT_SPREAD` in a dtype of which some bits are no number."""
    device = generator.device
    if dtype.is_floating_point:
        noise = torch.empty(size, dtype=torch.float32, device=device).normal_(generator=generator)
        return noise.mul_(RANDOM_FLOAT_SPREAD).to(dtype)
    bounds = torch.iinfo(dtype)
    return torch.randint(bounds.min, bounds.max + 1, size, dtype=dtype, device=device, generator=generator)


def _scaled(name: str, noise: Tensor) -> Tensor:
    """Vectors around 1 (norms, scales), matrices of variance 1 / inputs; a few have gains of their own."""
    if noise.dim() == 1:
        center = next((center for part, center in _VECTOR_CENTERS if part in name), 1.0)
        return noise.mul_(0.1).add_(1.0).mul_(center)
    if name.endswith("router.proj.weight"):
        return noise.mul_(_ROUTER_SPREAD)
    gain = _TABLE_GAIN if "embed_tokens" in name or name == HEAD_WEIGHT else 1.0
    return noise.mul_(gain * noise.shape[-1] ** -0.5)


def _generator(name: str, block: int, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{name}:{block}".encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
