"""Speculation is lossless: ids with any drafter equal ids without, to the id, in float64. No exceptions.

405 random requests (5 shapes, 4 drafters, 2 or 3 of 3 situations for each pair, one of each sampler) are served by
an engine without a drafter and by one with; real drafters have their drafts replaced by a script's in two of three
rounds, so that every number of accepted drafts occurs. Freed pages are NaN in all of them, and every second engine is a
step ahead (lag 1). Thousands more, of every kind, are those of `support.random_cases`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from support.checkpoints.tiny import SHAPES, VOCAB_SIZE, WINDOW, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import DFLASH_WINDOW, tiny_assistant, tiny_dflash
from support.engine.engine_runner import Run, engine_config, run_engine
from support.engine.lags import lags_in_turn
from support.engine.random_requests import MAX_MODEL_LEN, SAMPLERS, random_requests, scarce_pages, short_chunks
from support.engine.scripted_drafters import (
    Script,
    ScriptedDrafter,
    Texts,
    always,
    always_right,
    always_wrong,
    in_turn,
    plain_texts,
    randomly_right,
    right_across,
    right_until,
)
from support.engine.speculation_rig import Rig, solo_rig

REQUESTS = len(SAMPLERS)
MAX_TOKENS = 40
MASK_ID = 4
DRAFTERS = ("scripted", "mtp", "mtp-centroids", "dflash")
NUM_DRAFT_TOKENS = {"scripted": 11, "mtp": 8, "mtp-centroids": 8, "dflash": 15}
MOST_DRAFTS = max(NUM_DRAFT_TOKENS.values())
SITUATIONS = (short_chunks, scarce_pages, None)
"""Each shape and each drafter meets all of them; every three of shape, drafter and situation come together in
`support.random_cases` alone."""
EDGES = (WINDOW, 2 * WINDOW, DFLASH_WINDOW, 2 * DFLASH_WINDOW, MAX_MODEL_LEN)


def drafter_path(directory: Path, drafter: str) -> Path | None:
    match drafter:
        case "mtp":
            return tiny_assistant(directory)
        case "mtp-centroids":
            return tiny_assistant(directory, centroids=True)
        case "dflash":
            return tiny_dflash(directory, block_size=16)
    return None


def rig_of(shape: Shape, drafter: str) -> Rig:
    directory = tiny_checkpoint(shape)
    path = drafter_path(directory, drafter)
    return solo_rig(directory, drafter_path=path, num_draft_tokens=NUM_DRAFT_TOKENS[drafter])


def every_script(texts: Texts) -> Script:
    """Right, wrong, partly right, at the edges of windows, stop ids, the mask id, the vocabulary's ends."""
    return in_turn(
        always_right(texts),
        always_right(texts),
        always_wrong(texts, VOCAB_SIZE),
        right_until(texts, VOCAB_SIZE, 1),
        right_until(texts, VOCAB_SIZE, 3),
        right_until(texts, VOCAB_SIZE, 7),
        randomly_right(texts, VOCAB_SIZE),
        right_across(texts, VOCAB_SIZE, EDGES),
        always(1, 106, 50, 9, 18),
        always(MASK_ID),
        always(0, VOCAB_SIZE - 1),
    )


def requests_for(drafter: str, seed: int) -> list[Submit]:
    """A seed's requests, which are those of another drafter but for how many drafts they ask for."""
    most = NUM_DRAFT_TOKENS[drafter]
    submits = random_requests(seed, REQUESTS, num_draft_tokens=MOST_DRAFTS, max_tokens=MAX_TOKENS)
    return [
        msgspec.structs.replace(
            submit,
            params=msgspec.structs.replace(submit.params, num_draft_tokens=asked and 1 + (asked - 1) % most),
        )
        for submit in submits
        for asked in (submit.params.num_draft_tokens,)
    ]


@functools.cache
def plain_run(shape: Shape, seed: int) -> Run:
    """Answers without drafts, the same for all drafters."""
    submits = random_requests(seed, REQUESTS, num_draft_tokens=MOST_DRAFTS, max_tokens=MAX_TOKENS)
    return solo_rig(tiny_checkpoint(shape)).run(submits, max_model_len=MAX_MODEL_LEN)


def drive(rig: Rig, drafter: str, texts: Texts) -> ScriptedDrafter:
    """The drafter with scripts in place of two of three of its rounds, or scripts alone."""
    script = every_script(texts)
    if drafter == "scripted":
        return ScriptedDrafter(script)

    def two_of_three(request_id: str, position: int, count: int) -> list[int] | None:
        return script(request_id, position, count) if position % 3 else None

    return ScriptedDrafter(two_of_three, rig.drafter)


def outcome(run: Run) -> dict[str, tuple[Any, ...]]:
    """All that a client sees but logprobs: ids, why it ended, where."""
    return {
        request_id: (result.ids, result.last.finish, result.last.matched_stop_id)
        for request_id, result in run.results.items()
    }


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_ids_equal_those_without_a_drafter(shape: Shape, drafter: str) -> None:
    rig, most = rig_of(shape, drafter), NUM_DRAFT_TOKENS[drafter]
    accepted = set()
    first = SHAPES.index(shape) + DRAFTERS.index(drafter)
    count = 3 if drafter == "dflash" else 2  # more drafts, so that each number of accepted ones is met seldom
    for i, situation in [(n % 3, SITUATIONS[n % 3]) for n in range(first, first + count)]:
        seed = 100 * SHAPES.index(shape) + i
        submits, plain = requests_for(drafter, seed), plain_run(shape, seed)
        scripted = drive(rig, drafter, plain_texts(submits, plain.ids))
        limits = {"max_model_len": MAX_MODEL_LEN} if situation is None else situation(seed, rig)
        run = rig.run(submits, drafter=scripted, lag=(1 + i + DRAFTERS.index(drafter)) % 2, **limits)
        assert outcome(run) == outcome(plain)
        assert (run.preemptions > 0) == (situation is scarce_pages)
        accepted |= {r.num_accepted for r in scripted.rounds}
    assert accepted >= set(range(min(most, 5))), "rounds of every acceptance occur"


def check_own_drafts(shape: Shape, drafter: str, lag: int) -> None:
    """The real drafter's own drafts, round after round."""
    submits, rig = requests_for(drafter, 7), rig_of(shape, drafter)
    run = rig.run(submits, lag=lag, **short_chunks(7, rig))
    assert outcome(run) == outcome(plain_run(shape, 7))
    assert run.speculation.drafted > 200


@lags_in_turn("shape, drafter", ["E2B", "26B-A4B"], ["mtp", "mtp-centroids", "dflash"])
def test_ids_with_a_drafters_own_drafts(shape: Shape, drafter: str, lag: int) -> None:
    check_own_drafts(shape, drafter, lag)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7, 8])
def test_mtp_ids_for_every_k(k: int) -> None:
    """Through `EngineRank`, whose settings choose drafter and k."""
    submits = [s for s in random_requests(50 + k, 9, num_draft_tokens=8) if s.params.num_draft_tokens != 0]
    assert_same_as_without(submits, "mtp", num_draft_tokens=k, lag=k % 2)


@pytest.mark.parametrize("block_size", [2, 3, 5, 8, 11, 16])
def test_dflash_ids_for_every_block_size(block_size: int) -> None:
    submits = [s for s in random_requests(60 + block_size, 9, num_draft_tokens=15) if s.params.num_draft_tokens != 0]
    assert_same_as_without(submits, "dflash", num_draft_tokens=block_size - 1, lag=block_size % 2)


def assert_same_as_without(submits: list[Submit], drafter: str, **settings: Any) -> None:
    directory = tiny_checkpoint("E4B")
    plain = solo_rig(directory).run(submits, max_model_len=MAX_MODEL_LEN)
    config = engine_config(
        directory,
        drafter_path=str(drafter_path(directory, drafter)),
        max_model_len=MAX_MODEL_LEN,
        max_step_tokens=128,
        prefill_chunk=9,
        **settings,
    )
    run = run_engine(SoloCommunicator(), config, submits)
    assert run is not None
    assert outcome(run) == outcome(plain)
    assert run.speculation.drafted > 0
    assert len(run.speculation.accepted_per_position) <= settings["num_draft_tokens"]
