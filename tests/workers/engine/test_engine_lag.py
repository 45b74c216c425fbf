"""One step in flight changes nothing that a client sees: ids, endings, log-probabilities, usage, counters."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gemray_workers.messages import SequenceDelta, Submit
from support.checkpoints.tiny import SHAPES, Shape
from support.engine.engine_runner import Run
from support.engine.random_requests import MAX_MODEL_LEN, random_requests, short_chunks
from support.engine.scripted_drafters import ScriptedDrafter, plain_texts

from .test_speculation_ids import DRAFTERS, drive, outcome, plain_run, requests_for, rig_of


def with_logprobs(submits: list[Submit]) -> list[Submit]:
    """Every third request asks for log-probabilities, every fifth for its prompt's."""
    changed = []
    for i, submit in enumerate(submits):
        params = submit.params
        if i % 3 == 0:
            params = msgspec.structs.replace(params, logprobs=i % 4)
        if i % 5 == 0:
            params = msgspec.structs.replace(params, prompt_logprobs=2)
        changed.append(msgspec.structs.replace(submit, params=params))
    return changed


def seen(run: Run) -> dict[str, tuple[Any, ...]]:
    """All that a client sees of each request, however it was cut into deltas."""
    return {
        request_id: (
            result.ids,
            end_of(result.last),
            logprobs(result.deltas, "logprobs"),
            logprobs(result.deltas, "prompt_logprobs"),
        )
        for request_id, result in run.results.items()
    }


def end_of(delta: SequenceDelta) -> tuple[Any, ...]:
    return delta.finish, delta.matched_stop_id, delta.fault, delta.speculation


def logprobs(deltas: list[SequenceDelta], name: str) -> list[Any]:
    """Rounded: a row's sums may be in another order in another batch."""
    return [
        (entry.token_id, round(entry.logprob, 9), [(token, round(value, 9)) for token, value in entry.top])
        for delta in deltas
        for entry in getattr(delta, name) or []
    ]


IN_TURN = [(shape, DRAFTERS[turn % len(DRAFTERS)]) for index, shape in enumerate(SHAPES) for turn in (index, index + 2)]
"""Two drafters a shape: what a step in flight may change follows from either, and from no pair of them."""


@pytest.mark.parametrize(("shape", "drafter"), IN_TURN)
def test_a_step_in_flight_changes_nothing(shape: Shape, drafter: str) -> None:
    rig, seed = rig_of(shape, drafter), 5000 + 100 * SHAPES.index(shape)
    submits, plain = with_logprobs(requests_for(drafter, seed)), plain_run(shape, seed)
    limits = short_chunks(seed, rig)
    at_once, late = (
        rig.run(submits, drafter=drive(rig, drafter, plain_texts(submits, plain.ids)), lag=lag, **limits)
        for lag in (0, 1)
    )
    assert outcome(at_once) == outcome(plain)
    assert seen(late) == seen(at_once)
    assert late.speculation == at_once.speculation
    assert late.speculation.drafted > 0


def test_the_host_runs_one_step_ahead() -> None:
    """A sequence costs one step more than at lag 0, the one that was in flight at its end, and no more."""
    rig = rig_of("E2B", "scripted")
    submits = random_requests(1, 1, num_draft_tokens=1, max_tokens=20)
    nothing = ScriptedDrafter(lambda _request, _position, count: [0] * count)
    at_once, late = (rig.run(submits, drafter=nothing, lag=lag, max_model_len=MAX_MODEL_LEN) for lag in (0, 1))
    assert at_once.ids == late.ids
    assert at_once.steps <= late.steps <= at_once.steps + 2
