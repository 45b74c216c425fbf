"""Cycles in the shapes of graphs: what a plan leaves empty changes nothing of it, and buckets are chosen by a rule."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemray_workers.engine.buckets import GREEDY, PUBLISHED, BucketFinder, bucket, buckets, smallest, without_choice
from gemray_workers.engine.prompt_room import PromptRoom, worthwhile_rows
from gemray_workers.execution.cycle_rows import CyclePlan, CycleShape
from gemray_workers.messages import Submit
from gemray_workers.model.config import ModelConfig
from gemray_workers.model.target import first_narrowed
from gemray_workers.sampling.features import Features
from support.checkpoints.tiny import SHAPES, VOCAB_SIZE, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import Run, request
from support.engine.gpu import CONFIGS
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


ROOM = PromptRoom.of(chunk=256, step_rows=512, worthwhile=4096)


@given(shapes())
def test_the_smallest_bucket_that_holds_a_plan_is_chosen(shape: CycleShape) -> None:
    all_of_them = buckets(max_num_seqs=12, num_draft_tokens=(7,), prompts=ROOM)
    found = smallest(shape, all_of_them)
    holding = [
        b
        for b, _ in all_of_them
        if b.num_sequences >= shape.num_sequences
        and b.max_drafts >= shape.max_drafts
        and b.num_rows >= shape.num_rows
        and b.most_rows >= shape.most_rows
        and b.num_outputs >= shape.num_outputs
        and b.most_outputs >= shape.most_outputs
    ]
    assert (found is None) == (not holding)
    if found is not None:
        assert found in all_of_them
        assert found[0] in holding
        assert found[0].num_drafting >= shape.num_drafting
        assert found[0].num_choosing >= shape.num_choosing
        assert found[0].num_block_rows >= shape.num_block_rows
        assert found[0].num_rows == min(b.num_rows for b in holding)


@given(
    prompts=st.lists(st.integers(1, 256), max_size=12),
    decoding=st.integers(0, 12),
    max_drafts=st.sampled_from((0, 2, 7)),
)
def test_every_step_of_a_server_has_a_bucket(prompts: list[int], decoding: int, max_drafts: int) -> None:
    """Chunks of several prompts and drafts of the others, up to what a step may have."""
    decoding = min(decoding, 12 - len(prompts))
    drafting = decoding if max_drafts else 0
    own = decoding + drafting * max_drafts
    while own + sum(prompts) > ROOM.step_rows:
        prompts.pop()
    if not prompts and not decoding:
        return
    shape = CycleShape(
        num_sequences=len(prompts) + decoding,
        num_drafting=drafting,
        num_choosing=len(prompts) + decoding,
        max_drafts=max_drafts if drafting else 0,
        num_rows=own + sum(prompts),
        most_rows=max([1 + max_drafts if drafting else 1, *prompts]),
        num_block_rows=drafting * (1 + max_drafts),
        num_outputs=len(prompts) + own,
        most_outputs=1 + max_drafts if drafting else 1,
    )
    assert smallest(shape, buckets(max_num_seqs=12, num_draft_tokens=(7,), prompts=ROOM)) is not None


def test_buckets_reach_the_largest_batch_and_half_and_all_drafts() -> None:
    found = [b for b, _ in buckets(max_num_seqs=12, num_draft_tokens=(7,), prompts=ROOM)]
    assert {b.num_sequences for b in found} == {1, 2, 4, 8, 12}
    assert {b.max_drafts for b in found} == {0, 3, 7}
    assert found[0].num_rows == 512
    assert [b.num_rows for b in found] == sorted((b.num_rows for b in found), reverse=True)
    assert {b.max_drafts for b, _ in buckets(max_num_seqs=1, num_draft_tokens=(0,), prompts=None)} == {0}


def test_a_prompt_alone_has_no_row_more_than_it_needs() -> None:
    """Products of 513 rows take a tile of rows more than those of 512."""
    room = PromptRoom.of(chunk=4096, step_rows=4096, worthwhile=4096)
    all_of_them = buckets(max_num_seqs=8, num_draft_tokens=(4,), prompts=room)
    for rows in (512, 1024, 2048, 4096):
        found = smallest(bucket(1, (), rows), all_of_them)
        assert found is not None
        assert found[0].num_rows == rows


@given(st.integers(512, 4096))
def test_few_rows_of_a_long_prompt_are_left_empty(rows: int) -> None:
    all_of_them = buckets(
        max_num_seqs=8, num_draft_tokens=(), prompts=PromptRoom.of(chunk=4096, step_rows=4096, worthwhile=4096)
    )
    found = smallest(bucket(1, (), rows), all_of_them)
    assert found is not None
    assert 1 - rows / found[0].num_rows <= 0.2


@given(decoding=st.integers(0, 11), tail=st.integers(2, 32), drafts=st.sampled_from((0, 4)))
def test_a_prompts_end_beside_a_batch_has_few_rows(decoding: int, tail: int, drafts: int) -> None:
    """Batches that decode leave no room for it, and a short prompt's graph would compute ten times the rows."""
    all_of_them = buckets(max_num_seqs=12, num_draft_tokens=(4,), prompts=ROOM)
    decode = bucket(decoding, (drafts,)) if decoding else without_choice(0)
    shape = replace(
        decode,
        num_sequences=decoding + 1,
        num_choosing=decoding + 1,
        num_rows=decode.num_rows + tail,
        most_rows=max(decode.most_rows, tail),
        num_outputs=decode.num_outputs + 1,
        most_outputs=max(decode.most_outputs, 1),
    )
    found = smallest(shape, all_of_them)
    assert found is not None
    assert found[0].num_rows <= 11 * (1 + drafts) + 32
    assert tail <= found[0].most_rows <= 32


@pytest.mark.parametrize("batch", [2, 8, 12])
def test_only_prompts_ends_leave_room_for_rows_that_no_decode_step_has(batch: int) -> None:
    plan = CyclePlan([], bucket(batch, (4,)), GREEDY)
    finder = BucketFinder(buckets(max_num_seqs=12, num_draft_tokens=(4,), prompts=ROOM))
    assert finder.fit(plan).shape.most_rows == 5
    assert finder.fit(replace(plan, shape=replace(plan.shape, most_rows=6))).shape.most_rows == 32


def test_a_chunk_that_chooses_no_token_computes_no_logits() -> None:
    all_of_them = buckets(max_num_seqs=8, num_draft_tokens=(4,), prompts=ROOM)
    found = smallest(without_choice(200), all_of_them)
    assert found == (without_choice(256), PUBLISHED)
    chooses = smallest(bucket(1, (), 200), all_of_them)
    assert chooses is not None
    assert chooses[0] == bucket(1, (), 256, 512)


def test_longer_chunks_than_are_worth_a_graph_run_eagerly() -> None:
    room = PromptRoom.of(chunk=4096, step_rows=4096, worthwhile=700)
    assert room == PromptRoom(256, alone=(384, 512, 700), beside_all=(384, 512, 700), step_rows=4096)
    all_of_them = buckets(max_num_seqs=8, num_draft_tokens=(4,), prompts=room)
    plan = CyclePlan([], bucket(1, (), 1024), GREEDY)
    assert BucketFinder(all_of_them).fit(plan) is plan


@pytest.mark.parametrize(
    ("shape", "tp", "least", "most"),
    [("31B", 1, 512, 1024), ("31B", 2, 1024, 2048), ("26B-A4B", 1, 4096, 1 << 14), ("E4B", 1, 4096, 1 << 14)],
)
def test_how_long_prompts_of_a_shape_are_captured(shape: str, tp: int, least: int, most: int) -> None:
    """31B computes 512 rows in as long as its launches take, E4B thousands."""
    model = ModelConfig.from_directory(CONFIGS / f"{shape}-it")
    assert least <= worthwhile_rows(model, first_narrowed(model), tp) < most


def test_a_plan_runs_with_features_that_cover_its_own_or_eagerly() -> None:
    captured = [(bucket(4, ()), features) for features in (GREEDY, PUBLISHED)]
    plan = CyclePlan([], bucket(3, ()), Features())
    assert BucketFinder(captured).fit(plan) == CyclePlan([], bucket(4, ()), GREEDY)
    sampled = CyclePlan([], bucket(3, ()), Features(candidates=64))
    assert BucketFinder(captured).fit(sampled).features == PUBLISHED
    assert BucketFinder(captured[1:]).fit(plan).features == PUBLISHED
    penalised = CyclePlan([], bucket(3, ()), Features(penalties=True))
    assert BucketFinder(captured).fit(penalised) is penalised
    too_long = CyclePlan([], bucket(3, (), 100), Features())
    assert BucketFinder(captured).fit(too_long) is too_long
