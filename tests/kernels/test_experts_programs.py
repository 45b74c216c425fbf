"""The experts' programs: those of the captured buckets are all that a server ever runs, so nothing compiles later."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from triton.runtime.jit import JITFunction

from gemray_kernels.triton.experts import expert_outputs
from gemray_workers.engine.buckets import buckets
from gemray_workers.engine.prompt_room import PromptRoom

TOP_K, HIDDEN, WIDTH, EXPERTS = 8, 2816, 704, 128


@cache
def programs(rows: int) -> frozenset[tuple[Any, ...]]:
    """What a layer's experts launch for so many rows: kernels, constants, and what is special of their integers."""
    found: set[tuple[Any, ...]] = set()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        integers = [
            (param.name, value == 1, value % 16 == 0)
            for param, value in zip(kernel.params, args, strict=False)
            if type(value) is int and not param.do_not_specialize
        ]
        found.add((kernel.__name__, *integers, *sorted(options.items())))

    weight = torch.empty(1, dtype=torch.bfloat16)
    with mock.patch.object(JITFunction, "run", run):
        expert_outputs(
            torch.empty(rows, HIDDEN, dtype=torch.bfloat16),
            torch.empty(rows, TOP_K, dtype=torch.int64),
            weight.expand(EXPERTS, 2 * WIDTH, HIDDEN),
            weight.expand(EXPERTS, HIDDEN, WIDTH),
        )
    return frozenset(found)


def test_buckets_have_every_program() -> None:
    prompts = PromptRoom.of(chunk=256, step_rows=512, worthwhile=4096)
    captured: set[tuple[Any, ...]] = set()
    for shape, _ in buckets(max_num_seqs=32, num_draft_tokens=(4,), prompts=prompts):
        captured |= programs(shape.num_rows)
    later = {rows: programs(rows) - captured for rows in range(1, 513)}
    assert not {rows: new for rows, new in later.items() if new}
