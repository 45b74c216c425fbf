"""What is in flight for a request that ends, or whose gang fails, is dropped: no client and no count sees it.

A stop string and a deadline come to the engine as a cancel, so the cancel after each number of tokens stands for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gemray_workers.parallel.communicator import SoloCommunicator
from support.engine.lags import at_both_lags
from support.random_cases.case import MAX_MODEL_LEN, Case, Limits, draw_case, original
from support.random_cases.serving import Served, serve_cases
from support.random_cases.verdict import differences, prepare

TOKENS = 14
LIMITS = Limits(
    num_slots=2,
    max_model_len=MAX_MODEL_LEN,
    prefill_chunk=16,
    spare_rows=0,
    spare_pages=None,
    admission_headroom=0,
    padded=False,
)


def case_of(lag: int, limits: Limits = LIMITS, **happens: Any) -> Case:
    """Four requests in two slots, so that whoever ends is followed by another in its slot at once; log-probabilities
    for one of them.
    """
    numbers = [n for n in range(40) if len(original(n).prompt_ids) <= 12 and not original(n).params.stop_token_ids][:4]
    submits = []
    for i, number in enumerate(numbers):
        params = msgspec.structs.replace(original(number).params, max_tokens=TOKENS, logprobs=1 if i == 3 else None)
        submits.append(msgspec.structs.replace(original(number), request_id=f"r{i}", params=params))
    return replace(
        draw_case(0, tp=1, drafter="mtp"),
        shape="31B",
        num_draft_tokens=4,
        lag=lag,
        limits=limits,
        submits=tuple(submits),
        originals={f"r{i}": number for i, number in enumerate(numbers)},
        arrivals={f"r{i}": 0 for i in range(4)},
        **{"cancels": {}, "ends": (), **happens},
    )


def served(case: Case) -> Served:
    """Asserts that it differs nowhere from plain decoding, and that every count adds up."""
    job, expected = prepare(case)
    found = serve_cases(SoloCommunicator(), [job])[0]
    assert found is not None
    assert differences(case, expected, found) == []
    return found


def counted(found: Served) -> int:
    return sum(life.stats.speculation.accepted for life in found.lives)


def cancels() -> Iterator[Mapping[str, int]]:
    """After more and more tokens, the first request and its neighbour."""
    for count in range(0, TOKENS, 2):
        yield {"r0": count, "r1": count // 2}


@at_both_lags
@pytest.mark.slow
def test_a_cancel_after_any_number_of_tokens(lag: int) -> None:
    runs = [served(case_of(lag, cancels=cancel)) for cancel in cancels()]
    dropped = sum(run.accepted - counted(run) for run in runs)
    assert (dropped > 0) == (lag == 1), "only a step ahead is something in flight"
    assert sum(len(run.cancelled) for run in runs) > TOKENS // 2


@at_both_lags
def test_a_gang_that_fails_after_any_number_of_steps(lag: int) -> None:
    for steps in (1, 2, 3, 5, 8):
        assert len(served(case_of(lag, ends=(steps, 3))).lives) == 3


@at_both_lags
def test_preemption_with_a_step_in_flight(lag: int) -> None:
    limits = replace(LIMITS, num_slots=4, spare_pages=0, max_model_len=12 + TOKENS)
    found = served(case_of(lag, limits))
    assert found.lives[0].stats.num_preemptions > 0


@at_both_lags
@pytest.mark.parametrize("place", range(0, TOKENS, 3))
def test_a_stop_id_inside_a_block_of_drafts(place: int, lag: int) -> None:
    """Each request stops at a token of its own text: what follows it in its block, and in the step behind, is cut."""
    case = case_of(lag)
    _, expected = prepare(case)
    submits = [
        msgspec.structs.replace(
            s,
            params=msgspec.structs.replace(s.params, stop_token_ids=(expected[s.request_id].free_ids[place],)),
        )
        for s in case.submits
    ]
    found = served(replace(case, submits=tuple(submits)))
    ends = [delta for life in found.lives for delta in life.deltas if delta.finish is not None]
    assert {delta.finish for delta in ends} == {"stop_token"}
