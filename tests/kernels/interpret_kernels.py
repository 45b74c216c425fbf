"""Run by `test_triton_kernels` in a process of its own: prints the name and relative error of every kernel and case."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gemray_kernels.table import triton_kernels
from gemray_kernels.triton.paged_attention import paged_attention
from support.kernels.kernel_parity import (
    AttentionCase,
    accepted_transposed,
    fp8_bytes_that_differ,
    kernel_errors,
    kernel_runs,
    router_differences,
)
from support.kernels.quick_interpreter import patch_language_once

DECODE = [(1, 1), (5, 5), (1, 19), (7, 13), (3, 8), (1, 4)]
LONG = [(1, 700), (5, 300), (40, 200), (17, 301)]
EDGES = [(2, 0), (0, 6), (4, 3), (1, 129)]

CASES = {
    "decode": AttentionCase(DECODE, 4, 2, 16, page_size=4),
    "decode, windowed": AttentionCase(DECODE, 4, 2, 16, page_size=4, window=3),
    "block of a drafter": AttentionCase(DECODE, 4, 2, 16, page_size=4, causal=False, scale=0.25),
    "chunks and a prompt": AttentionCase(LONG, 4, 1, 32),
    "chunks and a prompt, windowed": AttentionCase(LONG, 4, 1, 32, window=200),
    "chunks, neither causal nor whole": AttentionCase(LONG, 4, 1, 32, window=130, causal=False),
    "chunk and padding": AttentionCase([(50, 60), (3, 20), (45, 0)], 4, 2, 16),
    "no rows, no keys": AttentionCase(EDGES, 4, 4, 16),
    "three heads a KV head": AttentionCase([(50, 60)], 6, 2, 16),
    "head dim of no power of two": AttentionCase([(3, 150)], 4, 2, 24),
}
FP8_CASES = ("decode, windowed", "chunks and a prompt", "head dim of no power of two")
SCRATCH = [(1, 300), (40, 200), (5, 130)]
SCRATCH_CASES = {
    "chunks and a prompt": AttentionCase(SCRATCH, 2, 1, 32),
    "chunks and a prompt, windowed": AttentionCase(SCRATCH, 2, 1, 32, window=130),
    "head dim of no power of two": CASES["head dim of no power of two"],
}
"""Each is interpreted three times, so they are smaller."""
PADDED = AttentionCase([(5, 70), (1, 9), (45, 0)], 4, 2, 16)
"""Rows of the null slot, which see no key and get zeros although there are more of them than a sequence was said to
have."""


def numbers_that_follow_from_scratch(case: AttentionCase) -> int:
    """Numbers that are others where partial sums lie in memory that held NaN, of the last call's among them."""
    scratch = torch.full((8 << 20,), 255, dtype=torch.uint8)
    options: dict[str, Any] = {"window": case.window, "causal": case.causal, "scale": case.scale}
    batch = case.batch(torch.float32, "cpu", 5)
    expected = paged_attention(*batch, **options)
    found = [paged_attention(*batch, **options, scratch=scratch) for _ in range(2)]
    assert not scratch.eq(255).all(), "nothing was left there"
    return sum(int((a != expected).sum()) for a in found)


def main() -> None:
    """Interpreted bfloat16 is truncated, not rounded, so only float32 says something about digits."""
    for dtype in (torch.float32, torch.bfloat16):
        names = CASES if dtype == torch.float32 else ("decode", "no rows, no keys")
        for seed, name in enumerate(names):
            case = CASES[name]
            print(dtype, "attention: " + name, case.error(paged_attention, dtype, "cpu", seed), sep="\t")
        few_rows = partial(paged_attention, most_rows=5)
        print(dtype, "attention: few rows and padding", PADDED.error(few_rows, dtype, "cpu", 9), sep="\t")
        fp8_names = FP8_CASES if dtype == torch.float32 else ("decode",)
        for seed, name in enumerate(fp8_names):
            error = CASES[name].fp8_error(paged_attention, dtype, "cpu", seed)
            print(dtype, "attention over 8-bit pages: " + name, error, sep="\t")
        runs = kernel_runs("cpu", 7, rows=6, width=96, heads=4, kv_heads=2, head_dim=32, experts=12, top_k=3)
        for name, error in kernel_errors(triton_kernels(), runs, dtype).items():
            print(dtype, name, error, sep="\t")
    print("layouts", "accepted transposed", len(accepted_transposed(triton_kernels(), "cpu")), sep="\t")
    for name, count in fp8_bytes_that_differ(triton_kernels(), "cpu", interpreted=True).items():
        if "bfloat16" not in name:
            print("bytes", name, count, sep="\t")
    for name, case in SCRATCH_CASES.items():
        print("bytes", "scratch: " + name, numbers_that_follow_from_scratch(case), sep="\t")
    print("router", "rows that differ", router_differences(triton_kernels(), "cpu"), sep="\t")


if __name__ == "__main__":
    patch_language_once()
    main()
