"""Answers without the sequences that a request names: a token-by-token oracle's ids, whatever drafts and lag do."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from gemray_workers.embedded import EmbeddedName, embedded_path
from gemray_workers.messages import Submit
from support.engine.engine_runner import request
from support.engine.held_out_requests import held_out_requests
from support.engine.random_requests import scarce_pages
from support.engine.speculation_rig import Rig, solo_rig

TARGET = embedded_path("gemray-tiny")
NUM_TOKENS = 16
SAMPLERS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 64, "seed": 5})


def rig_of(drafter: EmbeddedName | None) -> Rig:
    return solo_rig(TARGET, drafter_path=None if drafter is None else embedded_path(drafter))


@functools.cache
def submits() -> tuple[Submit, ...]:
    """Each forbids pieces of what it would have said, and the last one nothing."""
    prompts = held_out_requests(8, 1, longest_prompt=24)
    free = [request(f"{number}", prompts[number].prompt_ids, NUM_TOKENS, **SAMPLERS[number % 2]) for number in range(4)]
    run = rig_of(None).run(free)
    bad = []
    for submit in free[:-1]:
        ids = run.ids[submit.request_id]
        words = (tuple(ids[2:4]), tuple(ids[5:8]), tuple(ids[9:11]), (ids[0], ids[0]))
        bad.append(msgspec.structs.replace(submit, params=msgspec.structs.replace(submit.params, bad_words=words)))
    return *bad, free[-1]


def completing(words: Sequence[tuple[int, ...]], ids: list[int]) -> tuple[int, ...]:
    return tuple(word[-1] for word in words if (tuple(ids) + word[-1:])[-len(word) :] == word)


@functools.cache
def oracle() -> dict[str, list[int]]:
    """One token a request, with what it must not be among the suppressed ids."""
    ids: dict[str, list[int]] = {submit.request_id: [] for submit in submits()}
    for _ in range(NUM_TOKENS):
        steps = [
            Submit(
                request_id=submit.request_id,
                prompt_ids=[*submit.prompt_ids, *ids[submit.request_id]],
                params=msgspec.structs.replace(
                    submit.params,
                    max_tokens=1,
                    bad_words=(),
                    suppress_tokens=completing(submit.params.bad_words, ids[submit.request_id]),
                ),
            )
            for submit in submits()
        ]
        for name, new in rig_of(None).run(steps).ids.items():
            ids[name] += new
    return ids


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("drafter", [None, "gemray-tiny-assistant", "gemray-tiny-dflash"])
def test_ids_are_the_oracle_s(drafter: EmbeddedName | None, lag: int) -> None:
    run = rig_of(drafter).run(list(submits()), lag=lag)
    assert run.ids == oracle()
    for submit in submits()[:-1]:
        ids = run.ids[submit.request_id]
        assert all(tuple(ids[i : i + len(w)]) != w for w in submit.params.bad_words for i in range(len(ids)))


def test_preempted_and_replayed_answers_go_on() -> None:
    rig = rig_of("gemray-tiny-assistant")
    assert rig.run(list(submits()), **scarce_pages(0, rig)).ids == oracle()
    for kept in (1, 7):
        replayed = [
            msgspec.structs.replace(submit, emitted_ids=oracle()[submit.request_id][:kept]) for submit in submits()
        ]
        run = rig.run(replayed)
        assert run.ids == {name: ids[kept:] for name, ids in oracle().items()}


def test_words_that_leave_nothing_are_the_request_s_fault() -> None:
    prompt_ids = submits()[0].prompt_ids
    allowed = (300, 301)
    every_pair = tuple((a, b) for a in allowed for b in allowed)
    stuck = request("stuck", prompt_ids, 9, allowed_token_ids=allowed, bad_words=every_pair)
    run = rig_of(None).run([stuck, submits()[-1]])
    last = run.results["stuck"].last
    assert (len(run.ids["stuck"]), last.finish) == (1, "unmet")
    assert "bad word" in (last.fault or "")
    assert run.ids[submits()[-1].request_id] == oracle()[submits()[-1].request_id]
