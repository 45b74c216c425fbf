"""Cycles in the shapes of graphs: what a plan leaves empty changes nothing of it, and buckets are chosen by a rule."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemray_workers.engine.buckets import CAPTURED_FEATURES, bucket, buckets, fit, smallest
from gemray_workers.execution.cycle_rows import CyclePlan, CycleShape
from gemray_workers.messages import Submit
from gemray_workers.sampling.features import Features
from support.checkpoints.tiny import SHAPES, VOCAB_SIZE, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import Run, request
from support.engine.speculation_rig import Rig, solo_rig

NUM_DRAFT_TOKENS = 6
SAMPLERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "suppress_tokens": (5, 9)},
    {"temperature": 0.8, "top_k": 10, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 29))},
)


def requests(count: int) -> list[Submit]:
    rng = random.Random(8)
    return [
        request(
            f"r{i}",
            [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 7, 12, 30, 41)))],
            rng.randrange(1, 25),
            num_draft_tokens=rng.choice((None, 0, 2, 5)),
            seed=rng.getrandbits(64),
            **SAMPLERS[i % len(SAMPLERS)],
        )
        for i in range(count)
    ]


def rig_of(shape: Shape, method: str) -> Rig:
    directory = tiny_checkpoint(shape)
    path = {"none": None, "mtp": tiny_assistant, "dflash": tiny_dflash}[method]
    return solo_rig(
        directory,
        drafter_path=None if path is None else path(directory),
        num_draft_tokens=None if path is None else NUM_DRAFT_TOKENS,
    )


@functools.cache
def plain_run(shape: Shape) -> Run:
    """Neither padded nor drafting."""
    return rig_of(shape, "none").run(requests(9), num_slots=6, prefill_chunk=13)


@pytest.mark.parametrize("method", ["none", "mtp", "dflash"])
@pytest.mark.parametrize("shape", SHAPES)
def test_padding_changes_no_id(shape: Shape, method: str) -> None:
    rig, submits, plain = rig_of(shape, method), requests(9), plain_run(shape)
    padded = rig.run(submits, num_slots=6, prefill_chunk=13, padded=True, lag=SHAPES.index(shape) % 2)
    assert padded.ids == plain.ids
    assert padded.speculation == rig.run(submits, num_slots=6, prefill_chunk=13).speculation
    assert rig.padded.num_padded > 10
    assert (padded.speculation.drafted > 0) == (method != "none")


def shapes() -> st.SearchStrategy[CycleShape]:
    def shape(num_sequences: int, num_drafting: int, max_drafts: int, prompt_rows: int) -> CycleShape:
        drafting = min(num_drafting, num_sequences) if max_drafts else 0
        drafts = max_drafts if drafting else 0
        return CycleShape(
            num_sequences=num_sequences,
            num_drafting=drafting,
            num_choosing=num_sequences,
            max_drafts=drafts,
            num_rows=num_sequences + drafting * drafts + prompt_rows,
            most_rows=1 + max(drafts, prompt_rows),
            num_block_rows=drafting * (1 + drafts),
            num_outputs=num_sequences + drafting * drafts,
            most_outputs=1 + drafts,
        )

    return st.builds(shape, st.integers(1, 20), st.integers(0, 20), st.integers(0, 9), st.integers(0, 300))


@given(shapes())
def test_the_smallest_bucket_that_holds_a_plan_is_chosen(shape: CycleShape) -> None:
    all_of_them = buckets(max_num_seqs=12, num_draft_tokens=(7,), prompt_rows=(0, 256))
    found = smallest(shape, all_of_them)
    holding = [
        b
        for b in all_of_them
        if b.num_sequences >= shape.num_sequences
        and b.max_drafts >= shape.max_drafts
        and b.num_rows >= shape.num_rows
        and b.most_rows >= shape.most_rows
        and b.num_outputs >= shape.num_outputs
        and b.most_outputs >= shape.most_outputs
    ]
    assert (found is None) == (not holding)
    if found is not None:
        assert found in holding
        assert found.num_drafting >= shape.num_drafting
        assert found.num_choosing >= shape.num_choosing
        assert found.num_block_rows >= shape.num_block_rows
        assert found.num_rows == min(b.num_rows for b in holding)


def test_buckets_reach_the_largest_batch_and_half_and_all_drafts() -> None:
    found = buckets(max_num_seqs=12, num_draft_tokens=(7,), prompt_rows=(0, 256))
    assert {b.num_sequences for b in found} == {1, 2, 4, 8, 12}
    assert {b.max_drafts for b in found} == {0, 3, 7}
    assert found[0].num_rows == 12 * 8 + 256
    assert [b.num_rows for b in found] == sorted((b.num_rows for b in found), reverse=True)
    assert {b.max_drafts for b in buckets(max_num_seqs=1, num_draft_tokens=(0,), prompt_rows=(0,))} == {0}


def test_a_plan_runs_with_features_that_cover_its_own_or_eagerly() -> None:
    captured = [(bucket(4, (), 0), features) for features in CAPTURED_FEATURES]
    plan = CyclePlan([], bucket(3, (), 0), Features())
    assert fit(plan, captured) == CyclePlan([], bucket(4, (), 0), CAPTURED_FEATURES[0])
    sampled = CyclePlan([], bucket(3, (), 0), Features(candidates=64))
    assert fit(sampled, captured).features == CAPTURED_FEATURES[1]
    penalised = CyclePlan([], bucket(3, (), 0), Features(penalties=True))
    assert fit(penalised, captured) is penalised
    too_long = CyclePlan([], bucket(3, (), 100), Features())
    assert fit(too_long, captured) is too_long
