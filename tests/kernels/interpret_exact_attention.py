"""Run by `test_triton_exact_attention` in a process of its own: prints errors, and what differs where nothing may.

The interpreter multiplies tiles with NumPy, whose sums over a column depend on the tile's shape; here they are made one
input after the other, as the matrix units make them in steps of sixteen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import e, log2
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from gemray_kernels.reference.paged_attention import FEW_ROWS
from gemray_kernels.triton import exact_attention, prompt_attention
from gemray_kernels.triton.exact_attention import exact_paged_attention, exact_prompt_tiles
from gemray_kernels.triton.exact_softmax import SMALL_CHUNK, chunk_of, chunk_start, num_chunks
from gemray_kernels.triton.paged_attention import Tile, paged_attention
from support.kernels.exact_parity import INTERPRETED, ExactCase
from support.kernels.kernel_parity import AttentionCase
from support.kernels.quick_interpreter import patch_language_once

SMALL = replace(exact_prompt_tiles(1), pairs=64, depth=16, values_pairs=32, columns=16)
TILES = (Tile(pairs=16, keys=16, num_warps=4, num_stages=1), Tile(pairs=64, keys=64, num_warps=4, num_stages=1))
PLACES = [c + i for c in (64, 2048, 2176, 4096, 8192, 16384, 32768, 65536, 69632, 262144) for i in (-1, 0)]
RAGGED = [(3, 5), (1, 190), (2, 0), (0, 6), (4, 3)]
LONG = [(35, 150), (1, 140), (34, 40)]
ONE_KV_HEAD = ExactCase(9, 150, 2, 1, 16, cuts=((1, 2, 6),))
"""For tiles as they are on a card, which take longer to interpret."""


def chained_dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
    """``d + a · b``, one input after the other."""
    total = d.data.astype(np.float32)
    for k in range(a.data.shape[-1]):
        total = total + a.data[:, k : k + 1].astype(np.float32) * b.data[k : k + 1, :].astype(np.float32)
    return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)


def errors() -> Iterator[tuple[str, float]]:
    """By case: error against float64."""
    for window in (None, 33):
        case = AttentionCase(RAGGED, 4, 2, 24, window=window)
        yield f"few rows, window {window}", case.error(exact_paged_attention, torch.float32, "cpu", 1)
    whole = partial(exact_paged_attention, partial_bytes=0)
    yield "few rows, not split", case.error(whole, torch.float32, "cpu", 1)
    case = AttentionCase(LONG, 3, 1, 24)
    for restarts in (False, True):
        yield f"prompts, restarts {restarts}", case.error(prompts(restarts=restarts), torch.float32, "cpu", 1)
    with mock.patch.multiple(prompt_attention, WEIGHTS_BYTES=1, ROUND_KEYS=128):
        yield "prompts, round by round", case.error(prompts(restarts=False), torch.float32, "cpu", 1)
    scratch = torch.full((1 << 20,), 255, dtype=torch.uint8)
    with mock.patch.object(prompt_attention, "ROUND_KEYS", 128):
        kernel = prompts(restarts=False, scratch=scratch[: 400 << 10])
        yield "prompts, rounds that fit a scratch", case.error(kernel, torch.float32, "cpu", 1)
    shared = partial(exact_paged_attention, scratch=scratch)
    yield "few rows in a scratch", AttentionCase(RAGGED, 4, 2, 24).error(shared, torch.float32, "cpu", 1)
    windowed = AttentionCase(LONG, 2, 1, 16, window=40)
    yield "prompts, windowed", windowed.error(prompts(restarts=True), torch.float32, "cpu", 1)
    yield "8-bit pages", AttentionCase(LONG[:2], 2, 1, 16).fp8_error(prompts(restarts=True), torch.float32, "cpu", 1)


def prompts(*, restarts: bool, scratch: Tensor | None = None) -> Any:
    """Attention in float32 with the kernels for prompts, whose sequences of few rows it leaves to the others."""

    def kernel(q_TND: Tensor, *arguments: Any, **options: Any) -> Tensor:
        k_pages, v_pages, table_SP, start_Z, kv_len_S = arguments
        num_rows_S = start_Z.diff()
        is_few_S = num_rows_S <= FEW_ROWS
        is_few_T = is_few_S.repeat_interleave(num_rows_S)
        out_TND = torch.empty_like(q_TND)
        prompt_attention.attend_prompts(
            q_TND,
            k_pages,
            v_pages,
            table_SP,
            start_Z,
            kv_len_S,
            out_TND,
            window=options["window"],
            scale_log2=options["scale"] * options.get("k_scale", 1.0) * log2(e),
            v_scale=options.get("v_scale", 1.0),
            grid=0.0,
            restarts=restarts,
            tiles=SMALL,
            block_seqs=64,
            early=False,
            scratch=scratch,
        )
        few_start_Z = torch.cat([start_Z[:1], (num_rows_S * is_few_S).cumsum(0)]).to(start_Z.dtype)
        out_TND[is_few_T] = exact_paged_attention(
            q_TND[is_few_T], k_pages, v_pages, table_SP, few_start_Z, kv_len_S, **options
        )
        return out_TND

    return kernel


def differences() -> Iterator[tuple[str, int]]:
    """By case and tile: how many ways to compute rows differ, in the arithmetic of 16-bit floats but with digits of
    float32, for a difference in the last of these would seldom be seen behind a rounding."""
    with mock.patch.object(exact_attention, "is_rounded", return_value=True):
        for name, case in INTERPRETED.items():
            for tile in TILES:
                kernel = alternating(partial(exact_paged_attention, tile=tile, prompt_tiles=SMALL))
                found = list(case.differences(kernel, torch.float32, "cpu", 3))
                yield f"{name}, tiles of {tile.pairs} x {tile.keys}: {found}", len(found)
    for dtype in (torch.float32, torch.bfloat16):
        found = list(ONE_KV_HEAD.differences(exact_paged_attention, dtype, "cpu", 3))
        yield f"few rows, {dtype}: {found}", len(found)

    misplaced = [key for key in PLACES if not in_its_chunk(key)]
    yield f"chunks of the keys {misplaced}", len(misplaced)


def in_its_chunk(key: int) -> bool:
    """Whether the host counts as many chunks as the device up to a key, and the chunk's bounds are around it."""
    out_3 = torch.zeros(3, dtype=torch.int32)
    chunk_kernel[(1,)](out_3, key)
    number, first, following = out_3.tolist()
    return number == num_chunks(key + 1) - 1 and first <= key < following


@triton.jit(do_not_specialize=["key"])
def chunk_kernel(out_3, key):  # type: ignore[no-untyped-def]
    """The chunk of a key, its first key and the next chunk's."""
    chunk = chunk_of(key, SMALL_CHUNK, True)
    tl.store(out_3, chunk)
    tl.store(out_3 + 1, chunk_start(chunk, SMALL_CHUNK, True))
    tl.store(out_3 + 2, chunk_start(chunk + 1, SMALL_CHUNK, True))


def alternating(kernel: Any) -> Any:
    """The kernel, whose chunks of keys are split and not split in turn."""
    number = 0

    def attend(*arguments: Any, **options: Any) -> Tensor:
        nonlocal number
        number += 1
        return kernel(*arguments, partial_bytes=0 if number % 2 else 1 << 29, **options)

    return attend


def faults() -> Iterator[tuple[str, int]]:
    """By fault that is injected: how many ways to compute rows differ."""
    exact = partial(exact_paged_attention, prompt_tiles=SMALL)

    def ignoring_chunks(*arguments: Any, **options: Any) -> None:
        prompt_attention.attend_prompts(*arguments, **{**options, "restarts": False})

    def not_rounding(q_TND: Tensor, *arguments: Any, **options: Any) -> Tensor:
        with mock.patch.object(exact_attention, "GRID", 0.0):
            return exact(q_TND, *arguments, tile=TILES[len(q_TND) > 1], **options)

    few = INTERPRETED["few rows"]
    with mock.patch.object(exact_attention, "is_rounded", return_value=True):
        with mock.patch.object(exact_attention, "attend_prompts", ignoring_chunks):
            found = list(INTERPRETED["prompts"].differences(exact, torch.float32, "cpu", 3))
        yield "sums of prompts are not cut at chunks", len(found)
        yield "scores are not rounded", len(list(few.differences(not_rounding, torch.float32, "cpu", 3)))
    yield "the split of fast attention", len(list(ONE_KV_HEAD.differences(paged_attention, torch.float32, "cpu", 3)))


def main() -> None:
    """Print one line a number: what it is, its name, itself."""
    interpreter.InterpreterBuilder.create_dot = chained_dot
    for kind, found in (("error", errors()), ("differences", differences()), ("fault", faults())):
        for name, number in found:
            print(kind, name, number, sep="\t")
            sys.stdout.flush()


if __name__ == "__main__":
    patch_language_once()
    main()
