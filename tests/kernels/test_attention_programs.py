"""Attention's programs: those of the captured buckets are all that a server ever runs, so nothing compiles later."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_workers.engine.buckets import buckets
from gemray_workers.engine.prompt_room import PromptRoom

GROUPS = {"31B sliding": (32, 16, 256, 1024), "31B full": (32, 4, 512, None), "E2B sliding": (8, 1, 256, 512)}
MOST_SEQUENCES = 32


def programs(group: str, num_rows: int, num_seqs: int, most_rows: int) -> set[tuple[Any, ...]]:
    """What one attention of such a batch would compile: kernels and their constants."""
    from triton.runtime.jit import JITFunction

    from gemray_kernels.triton.paged_attention import paged_attention

    heads, kv_heads, head_dim, window = GROUPS[group]
    found = set()

    def run(kernel: Any, *_: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        found.add((kernel.__name__, *sorted(constants.items())))

    pages = torch.empty(3, 16, kv_heads, head_dim, dtype=torch.bfloat16)
    with mock.patch.object(JITFunction, "run", run):
        paged_attention(
            torch.empty(num_rows, heads, head_dim, dtype=torch.bfloat16),
            pages,
            pages,
            torch.zeros(num_seqs, 300, dtype=torch.int32),
            torch.zeros(num_seqs + 1, dtype=torch.int32),
            torch.zeros(num_seqs, dtype=torch.int32),
            window=window,
            causal=True,
            scale=1.0,
            most_rows=most_rows,
        )
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_buckets_have_every_program(group: str) -> None:
    captured: set[tuple[Any, ...]] = set()
    prompts = PromptRoom.of(chunk=512, step_rows=1024, worthwhile=4096)
    for b, _ in buckets(max_num_seqs=MOST_SEQUENCES, num_draft_tokens=(4,), prompts=prompts):
        captured |= programs(group, b.num_rows, b.num_sequences + 1, b.most_rows)
    rng = random.Random(group)
    for _ in range(300):
        num_seqs = rng.randint(1, MOST_SEQUENCES)
        decoding = [rng.choice((1, 1, 3, 5)) for _ in range(num_seqs)]
        most_rows = rng.choice((1, 5, 40, 513, 2048))
        num_rows = sum(decoding[1:]) + most_rows
        later = programs(group, num_rows, num_seqs + 1, max(*decoding, most_rows)) - captured
        assert not later, (num_rows, num_seqs, most_rows, later)


@pytest.mark.parametrize("group", GROUPS)
def test_decoding_never_launches_what_long_chunks_need(group: str) -> None:
    for b, _ in buckets(max_num_seqs=MOST_SEQUENCES, num_draft_tokens=(4,), prompts=None):
        found = programs(group, b.num_rows, b.num_sequences + 1, b.most_rows)
        assert sorted(name for name, *_ in found) == ["attend_kernel", "combine_kernel"]
