"""Attention's programs: those of the captured buckets are all that a server ever runs, so nothing compiles later."""

from __future__ import annotations

import random
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.reference.keys_of_values import KeysOfValues
from gemray_kernels.reference.paged_attention import FEW_ROWS
from gemray_workers.engine.buckets import bucket, buckets, decode_buckets, smallest
from gemray_workers.engine.prompt_room import PromptRoom
from gemray_workers.rank.eager_shapes import eager_shapes

GROUPS = {
    "31B sliding": (32, 16, 256, 1024),
    "31B full": (32, 4, 512, None),
    "31B full on Hopper": (32, 4, 512, None),
    "E2B full on Hopper": (8, 1, 512, None),
    "E2B sliding": (8, 1, 256, 512),
    "31B sliding on Hopper": (32, 16, 256, 1024),
    "31B sliding of two on Hopper": (16, 8, 256, 1024),
    "E2B sliding on Hopper": (8, 1, 256, 512),
    "E4B sliding on Hopper": (8, 2, 256, 512),
}
DRAFTERS = {
    "31B DFlash": (64, 8, 128, 2048),
    "26B-A4B DFlash": (32, 8, 128, None),
    "31B DFlash on Hopper": (64, 8, 128, 2048),
    "26B-A4B DFlash of two on Hopper": (16, 4, 128, 2048),
}
MOST_SEQUENCES = 32
OF_VALUES = KeysOfValues(torch.empty(512, dtype=torch.bfloat16), num_rotating=64)


def on_hopper(_: torch.Tensor) -> bool:
    return True


@cache
def programs(
    group: str, num_rows: int, num_seqs: int, most_rows: int, most_keys: int | None = None, numerics: str = "fast"
) -> frozenset[tuple[Any, ...]]:
    """What one attention of such a batch would compile: kernels and their constants. Tests ask for the same batches."""
    from triton.runtime.jit import JITFunction

    from gemray_kernels.triton import few_attention, whole_attention, wide_attention
    from gemray_kernels.triton.exact_attention import exact_paged_attention
    from gemray_kernels.triton.paged_attention import paged_attention

    attention: Any = paged_attention if numerics == "fast" else exact_paged_attention
    heads, kv_heads, head_dim, window = (GROUPS | DRAFTERS)[group]
    found = set()

    def run(kernel: Any, *_: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        found.add((kernel.__name__, *sorted(constants.items())))

    pages = torch.empty(3, 16, kv_heads, head_dim, dtype=torch.bfloat16)
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(few_attention, "starts_early", on_hopper),
        mock.patch.object(wide_attention, "on_hopper", return_value="Hopper" in group),
        mock.patch.object(whole_attention, "on_hopper", return_value="Hopper" in group),
    ):
        attention(
            torch.empty(num_rows, heads, head_dim, dtype=torch.bfloat16),
            pages,
            pages,
            torch.zeros(num_seqs, 300, dtype=torch.int32),
            torch.zeros(num_seqs + 1, dtype=torch.int32),
            torch.zeros(num_seqs, dtype=torch.int32),
            window=window,
            causal=group in GROUPS,
            scale=1.0,
            most_rows=most_rows,
            most_keys=most_keys,
            keys_of_values=OF_VALUES if "31B full" in group else None,
        )
    return frozenset(found)


@pytest.mark.parametrize("group", [group for group in GROUPS if "Hopper" not in group])
def test_buckets_have_every_program(group: str) -> None:
    """On Hopper few rows of heads of 512 have programs of their own; what runs beside a prompt is rehearsed (below)."""
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
        kernels = sorted(name for name, *_ in found)
        if kernels == ["attend_whole_kernel"]:
            assert "sliding on Hopper" in group or "two on Hopper" in group
            continue
        attends, combines = kernels
        if "full on Hopper" in group and (b.most_rows <= 4 or "31B" in group):
            assert (attends, combines) == ("combine_chunks_kernel", "wide_attend_kernel")
        else:
            assert attends in ("attend_few_kernel", "attend_kernel")
            assert combines == "combine_kernel"


@pytest.mark.parametrize(
    ("group", "drafts", "batch", "kernel"),
    [
        ("E4B sliding on Hopper", (), 8, {"name": "attend_few_kernel", "PAIRS": 8, "WARPS": 4}),
        ("E2B sliding on Hopper", (), 8, {"name": "attend_few_kernel", "PAIRS": 8, "WARPS": 2}),
        ("E4B sliding on Hopper", (4,), 4, {"name": "attend_few_kernel", "PAIRS": 16}),
        ("31B full on Hopper", (), 8, {"name": "wide_attend_kernel", "pairs": 8}),
        ("E2B full on Hopper", (), 32, {"name": "wide_attend_kernel", "pairs": 8}),
    ],
    ids=str,
)
def test_graphs_of_decoding_have_the_kernels_of_few_rows(
    group: str, drafts: tuple[int, ...], batch: int, kernel: dict[str, Any]
) -> None:
    """Such a graph serves a step of one row a sequence, or of a row and its drafts, and no prompt's."""
    room = PromptRoom.of(chunk=512, step_rows=1024, worthwhile=4096)
    keys = buckets(max_num_seqs=32, num_draft_tokens=drafts, prompts=room)
    step = bucket(batch, drafts)
    found = smallest(step, keys)
    assert found is not None
    assert found[0] == step
    launched = programs(group, step.num_rows, batch + 1, step.most_rows)
    (constants,) = (dict(rest) for name, *rest in launched if name == kernel["name"])
    of_shape = vars(constants["SHAPE"]) if "SHAPE" in constants else {}
    told: dict[str, Any] = {**constants, **of_shape, "name": kernel["name"]}
    assert kernel.items() <= told.items()


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("most_sequences", "chunk", "step"), [(1, 40, 56), (8, 24, 64), (16, 256, 512), (100, 512, 640)]
)
def test_eager_shapes_have_every_program(
    group: str, most_sequences: int, chunk: int, step: int, has_graphs: bool, numerics: str
) -> None:
    """Steps that run kernel by kernel, whose prompts' lengths the host knows, compile nothing."""
    drafts = (4,)
    at_start: set[tuple[Any, ...]] = set()
    shapes = eager_shapes(
        max_num_seqs=most_sequences, num_draft_tokens=drafts, prefill_chunk=chunk, max_step_tokens=step,
        max_model_len=4000, tiled_rows=(), drafted_rows=(), has_graphs=has_graphs,
    )  # fmt: skip
    for b in [*shapes, *(decode_buckets(most_sequences, drafts) if has_graphs else ())]:
        at_start |= programs(group, b.num_rows, b.num_sequences + 1, b.most_rows, b.most_keys, numerics)
    rng = random.Random(group)
    for _ in range(300):
        known: list[int] = []
        left = rng.choice((step, rng.randint(1, step)))
        while left and len(known) < rng.choice((most_sequences, rng.randint(1, most_sequences))):
            known.append(min(left, rng.choice((1, 1, 5, chunk, rng.randint(1, chunk)))))
            left -= known[-1]
        most_keys = rng.choice((max(known), 4000)) if max(known) > FEW_ROWS else 0
        later = programs(group, sum(known), len(known) + 1, max(known), most_keys, numerics) - at_start
        assert not later, (known, most_keys, later)


@pytest.mark.parametrize("group", DRAFTERS)
@pytest.mark.parametrize("most_drafts", [1, 4, 15])
def test_eager_shapes_have_every_program_of_drafts(group: str, most_drafts: int) -> None:
    """Blocks of drafts, of all sequences or of some, compile nothing."""
    at_start: set[tuple[Any, ...]] = set()
    shapes = eager_shapes(
        max_num_seqs=16, num_draft_tokens=(most_drafts,), prefill_chunk=256, max_step_tokens=512,
        max_model_len=4000, tiled_rows=(), drafted_rows=(), has_graphs=False,
    )  # fmt: skip
    for b in shapes:
        at_start |= programs(group, b.num_block_rows, b.num_sequences + 1, 1 + b.max_drafts)
    rng = random.Random(group)
    for _ in range(300):
        num_seqs = rng.randint(1, 16)
        drafts = [rng.randint(1, most_drafts) for _ in range(rng.randint(1, num_seqs))]
        later = programs(group, len(drafts) + sum(drafts), num_seqs + 1, 1 + max(drafts)) - at_start
        assert not later, (drafts, num_seqs, later)
