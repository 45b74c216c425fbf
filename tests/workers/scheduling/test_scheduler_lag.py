"""The scheduler one step ahead of the outcomes: what it plans, what it drops, and that answers are those of lag 0."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray_workers.scheduling.outcome import SequenceOutcome
from gemray_workers.scheduling.plan import ScheduledRows
from support.scheduling.fake_engine import STOP_ID, oracle, token_at
from support.scheduling.scheduler_bench import MAX_LEN, Bench, rows_by_slot, tokens_of


def lagged(num_pages: dict[str, int] | None = None, drafts: int = 0, **config: int) -> Bench:
    return Bench(num_pages, drafts, lag=1, **config)


def test_a_sequence_that_decodes_is_planned_before_its_counts_are_known() -> None:
    bench = lagged(drafts=3)
    bench.engine.num_correct = lambda *_: 2
    bench.submit("a", 20, max_tokens=30)
    plans = [bench.step() for _ in range(5)]
    assert [plan.scheduled for plan in plans] == [
        [ScheduledRows(0, 0, 16, 0, False)],
        [ScheduledRows(0, 16, 4, 0, True)],
        [ScheduledRows(0, 20, 1, 3, True)],  # the first token is in flight
        [ScheduledRows(0, 21, 1, 3, True)],  # 1 to 4 tokens are in flight
        [ScheduledRows(0, 24, 1, 3, True)],  # 3 of them came
    ]
    assert bench.scheduler.running[0].num_computed == 26


def test_at_most_lag_steps_are_in_flight_and_they_are_committed_in_order() -> None:
    bench = lagged()
    bench.submit("a", 3, max_tokens=30)
    first, second = bench.scheduler.schedule(), bench.scheduler.schedule()
    assert first is not None
    assert second is not None
    with pytest.raises(AssertionError, match="commit the oldest plan first"):
        bench.scheduler.schedule()
    with pytest.raises(AssertionError, match="step 1 comes before step 2"):
        bench.scheduler.commit(second, [SequenceOutcome(0, [5])])


def test_nothing_is_planned_for_a_sequence_that_ends_in_flight_whatever_is_accepted() -> None:
    bench = lagged(drafts=3)
    bench.submit("a", 3, max_tokens=1)
    assert len(bench.step().scheduled) == 1
    assert bench.scheduler.has_work
    assert bench.step().scheduled == []
    assert bench.final("a").finish == "length"


def test_pages_cover_the_most_that_can_be_computed_and_no_more_than_a_request_ever_needs() -> None:
    """With 9 tokens and one step in flight, 2 (1 + 3) rows may follow the confirmed ones; its end allows less."""
    bench = lagged(drafts=3)
    bench.engine.num_correct = lambda *_: 0
    bench.submit("long", 9, max_tokens=30)
    bench.submit("short", 9, max_tokens=5)
    for _ in range(3):
        bench.step()
    pages = [bench.scheduler.ledger.pages_of(slot)["full"] for slot in (0, 1)]
    assert [len(held) for held in pages] == [-(-(9 + 2 * (1 + 3)) // 4), -(-(9 + 5 - 1) // 4)]


@pytest.mark.parametrize("matches_stop_ids", [False, True])
def test_what_follows_a_stop_is_dropped(matches_stop_ids: bool) -> None:
    seed = next(s for s in range(9999) if STOP_ID not in tokens_of(s, 3, 6) and token_at(s, 6) == STOP_ID)
    bench = lagged()
    bench.engine.matches_stop_ids = matches_stop_ids
    bench.submit("a", 3, max_tokens=20, seed=seed, stop_token_ids=(STOP_ID,))
    bench.finish()
    assert bench.ids("a") == tokens_of(seed, 3, 7)
    assert bench.scheduler.stats(0.0).generated_tokens == 4
    assert bench.scheduler.step == 6, "4 tokens, one step in vain, one that tells of the release"


def test_a_slot_that_was_given_away_gets_nothing_of_its_last_owner() -> None:
    bench = lagged(max_num_seqs=1)
    bench.submit("a", 3, max_tokens=20)
    submit = bench.submit("b", 3, max_tokens=4)
    bench.step()
    bench.step()
    bench.scheduler.cancel("a")
    plan = bench.step()
    assert (plan.released, [admission.request_id for admission in plan.admitted]) == ([0], ["b"])
    assert [(rows.slot, rows.epoch) for rows in plan.scheduled] == [(0, 1)]
    assert bench.final("a").finish == "cancelled"
    assert bench.ids("a") == oracle(bench.submits["a"], MAX_LEN)[0][:1], "the second token was in flight"
    bench.finish()
    assert bench.ids("b") == oracle(submit, MAX_LEN)[0]


def test_a_preempted_sequence_comes_back_with_its_confirmed_tokens() -> None:
    bench = lagged({"sliding": 40, "full": 16}, admission_headroom=0)
    submits = {name: bench.submit(name, 10, max_tokens=40) for name in "abcd"}
    while not bench.scheduler.stats(0.0).num_preemptions:
        bench.step()
    while not (admitted := bench.step().admitted):
        pass
    assert admitted[0].token_ids == [*range(10), *bench.ids(admitted[0].request_id)], "what was in flight is void"
    bench.finish()
    for name, submit in submits.items():
        assert bench.ids(name) == oracle(submit, MAX_LEN)[0]


def test_a_prompt_of_one_chunk_is_drafted_for_in_the_next_step() -> None:
    bench = lagged(drafts=2)
    bench.submit("a", 5, max_tokens=9)
    bench.step()
    assert rows_by_slot(bench.step())[0].num_drafts == 2


@given(st.data())
@settings(max_examples=50)
def test_lag_changes_no_answer_and_no_count(data: st.DataObject) -> None:
    """With pages and rows for all, nothing is ever dropped but what follows a stop: even drafts are counted alike.

    Where rows run short, how prompts are cut depends on who else runs, and a prompt's last row alone is drafted behind.
    """
    seed = data.draw(st.integers(0, 1 << 30))
    rng = random.Random(seed)
    drafts = rng.randint(0, 4)
    config: dict[str, Any] = {
        "prefill_chunk": rng.choice([1, 5, 16]),
        "max_num_seqs": rng.randint(1, 5),
        "max_step_tokens": 128,
    }
    requests: list[dict[str, Any]] = [
        {
            "prompt_len": rng.randint(1, 30),
            "max_tokens": rng.randint(1, 40),
            "min_tokens": rng.choice([0, 5]),
            "stop_token_ids": rng.choice([(), (STOP_ID, 1, 2)]),
            "num_draft_tokens": rng.choice([None, 1, 0]),
            "logprobs": rng.choice([None, 0]),
        }
        for _ in range(rng.randint(1, 9))
    ]
    device_stops = rng.random() < 0.5

    def served(lag: int) -> Mapping[str, object]:
        bench = Bench(drafts=drafts, lag=lag, **config)
        bench.engine.matches_stop_ids = device_stops
        bench.engine.num_correct = lambda request_id, position, n: token_at(
            seed, int(request_id) + 97 * position, n + 1
        )
        for index, request in enumerate(requests):
            bench.submit(str(index), **request)
        bench.finish()
        stats = bench.scheduler.stats(0.0)
        found: dict[str, object] = {
            str(i): (bench.ids(str(i)), bench.final(str(i)).finish, bench.final(str(i)).speculation)
            for i in range(len(requests))
        }
        return {**found, "all": (stats.prompt_tokens, stats.generated_tokens, stats.speculation)}

    assert served(1) == served(0)
