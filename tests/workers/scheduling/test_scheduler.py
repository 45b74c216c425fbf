"""The scheduler: who is admitted, and which rows a step has."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemray_workers.errors import CapacityError, InvalidField
from gemray_workers.scheduling.plan import ScheduledRows
from gemray_workers.scheduling.request import Sequence
from gemray_workers.scheduling.shares import fair_shares, num_drafts_within_limits
from support.scheduling.fake_engine import STOP_ID, oracle, token_at
from support.scheduling.scheduler_bench import MAX_LEN, Bench, request, rows_by_slot, tokens_of

# Admission


@pytest.mark.parametrize(
    ("prompt_len", "message"),
    [(0, "prompt_ids = .* at least one token"), (64, "'64 tokens' is not allowed: at most 63 tokens"), (999, "'999")],
)
def test_what_can_never_run_is_refused(prompt_len: int, message: str) -> None:
    bench = Bench()
    with pytest.raises(InvalidField, match=message):
        bench.submit("bad", prompt_len)
    submit = bench.submit("good", 63)
    bench.finish()
    assert bench.ids("good") == oracle(submit, MAX_LEN)[0]
    assert len(bench.ids("good")) == 1
    assert bench.final("good").finish == "length"


def test_an_id_in_use_is_refused() -> None:
    bench = Bench()
    bench.submit("a", 3)
    with pytest.raises(InvalidField, match="request_id = 'a'"):
        bench.submit("a", 3)
    bench.finish()
    bench.submit("a", 3)


def test_pools_must_hold_one_sequence_of_the_stated_length() -> None:
    with pytest.raises(CapacityError, match="max_model_len = 64 tokens wants 16 pages of group full, 15 are available"):
        Bench({"sliding": 20, "full": 15})
    with pytest.raises(CapacityError, match="wants 7 pages of group sliding, 6 are available"):
        Bench({"sliding": 6, "full": 16})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"max_step_tokens": 3}, "max_step_tokens"),
        ({"max_step_tokens": 11, "num_draft_tokens": 2}, "max_step_tokens"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
        ({"admission_headroom": -1}, "admission_headroom"),
    ],
)
def test_config_names_the_wrong_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField, match=f"{field} = "):
        Bench(**changes)


def test_first_come_first_served_by_slots() -> None:
    bench = Bench(max_num_seqs=2)
    for name in "abc":
        bench.submit(name, 4, max_tokens=3 if name == "a" else 6)
    bench.step()
    assert bench.running == ["a", "b"]
    while "a" in bench.running:
        bench.step()
    plan = bench.step()
    assert plan.released == [0]
    assert [admission.slot for admission in plan.admitted] == [0]
    assert bench.running == ["b", "c"]


def test_a_short_prompt_is_admitted_beside_long_ones_and_overtakes_none_that_waits() -> None:
    bench = Bench(max_step_tokens=8, prefill_chunk=8)
    bench.submit("long", 60)
    bench.submit("longer", 61)
    bench.step()
    bench.submit("short", 3)
    plan = bench.step()
    assert bench.running == ["long", "longer", "short"]
    assert sorted(rows.num_known for rows in plan.scheduled) == [2, 3, 3]
    assert bench.step().scheduled[-1].samples
    assert bench.ids("short")


def test_short_prompts_do_not_wait_for_a_long_one_that_lacks_pages() -> None:
    """The issue's case, scaled: 20-token prompts behind a 1,600-token one, most of the pool idle."""
    pages = {"sliding": 2000, "full": 512}
    bench = Bench(pages, max_num_seqs=16, max_step_tokens=256, prefill_chunk=256, max_model_len=2000)
    bench.submit("first", 400, max_tokens=300)
    bench.step()
    bench.step()
    bench.submit("long", 1700)
    shorts = [bench.submit(f"short {i}", 20, max_tokens=4) for i in range(8)]
    bench.step()
    assert set(bench.running) == {"first", *(short.request_id for short in shorts)}
    for _ in range(5):
        bench.step()
    assert bench.running == ["first"]
    bench.finish()
    assert bench.final("long").finish == "length"


def test_those_who_overtook_give_way_as_soon_as_that_lets_the_oldest_start() -> None:
    """It starts in the step in which it would have without them, and they come back with what they have."""

    def step_of_long(*shorts: str) -> tuple[int, Bench]:
        bench = Bench({"sliding": 100, "full": 32}, max_num_seqs=3, max_model_len=110, prefill_chunk=32)
        bench.submit("first", 60, max_tokens=10)
        bench.step()
        bench.step()
        bench.submit("long", 100)
        for name in shorts:
            bench.submit(name, 4, max_tokens=60)
        while "long" not in bench.running:
            assert bench.scheduler.stats(0.0).num_preemptions == 0, "nobody gives way in vain"
            bench.step()
        return bench.scheduler.step, bench

    alone, _ = step_of_long()
    step, bench = step_of_long("a", "b")
    assert step == alone
    assert bench.scheduler.stats(0.0).num_preemptions >= 1
    assert bench.ids("a"), "it ran meanwhile"
    bench.finish()
    for name in ("long", "a", "b"):
        assert bench.ids(name) == oracle(bench.submits[name], 110)[0]


# Rows


def test_who_has_computed_nothing_itself_drafts_nothing() -> None:
    """What the prefix cache has of its text leaves a drafter nothing to start from."""
    sequence = Sequence.of(request("a", 4), arrival=0, max_model_len=MAX_LEN)
    sequence.slot, sequence.num_found, sequence.num_computed = 0, 3, 3
    config = Bench(drafts=3).config
    assert num_drafts_within_limits(2, sequence, config) == 0
    sequence.tokens.append(7)
    sequence.num_computed = 4
    assert num_drafts_within_limits(2, sequence, config) == 2


@given(st.integers(0, 60), st.lists(st.integers(1, 30), max_size=8))
def test_fair_shares(budget: int, demands: list[int]) -> None:
    shares = fair_shares(budget, demands)
    assert sum(shares) == min(budget, sum(demands))
    assert all(0 <= share <= demand for share, demand in zip(shares, demands, strict=True))
    unmet = [share for share, demand in zip(shares, demands, strict=True) if share < demand]
    if unmet:
        assert max(shares) - min(unmet) <= 1, "somebody got more than one who wanted more"
    if budget >= len(demands):
        assert all(shares)


def test_equal_demands_favour_the_oldest() -> None:
    assert fair_shares(8, [5, 5, 5]) == [3, 3, 2]
    assert fair_shares(2, [5, 5, 5]) == [1, 1, 0]


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    bench = Bench(max_step_tokens=9, prefill_chunk=8)
    bench.submit("a", 4, max_tokens=20)
    bench.step()
    bench.submit("b", 40)
    for start in (0, 8, 16):
        rows = rows_by_slot(bench.step())
        assert rows[0].samples
        assert rows[0].num_known == 1
        assert (rows[1].start, rows[1].num_known, rows[1].samples) == (start, 8, False)


def test_drafts_are_rows_of_the_step() -> None:
    bench = Bench(drafts=3, max_num_seqs=2, max_step_tokens=9)
    bench.submit("a", 4, max_tokens=30)
    bench.step()
    bench.submit("b", 30)
    rows = rows_by_slot(bench.step())
    assert (rows[0].num_known, rows[0].num_drafts) == (1, 3)
    assert rows[1].num_known == 5


def test_a_chunk_longer_than_the_step_asks_for_no_more_pages_than_the_step_can_fill() -> None:
    """The sliding pool holds one window and the 2 rows of a step; a prompt in chunks of 16 would never get in."""
    bench = Bench({"sliding": 4, "full": 16}, max_num_seqs=1, max_step_tokens=2, prefill_chunk=16)
    submit = bench.submit("a", 40)
    for _ in range(40):
        bench.step()
    assert bench.ids("a") == oracle(submit, MAX_LEN)[0]


@pytest.mark.parametrize(
    ("max_tokens", "prompt_len", "k", "expected"),
    [
        (30, 6, None, 4),
        (30, 6, 2, 2),
        (30, 6, 9, 4),
        (30, 6, 0, 0),
        (3, 6, None, 1),
        (2, 6, None, 0),
        (30, 60, None, 2),
    ],
)
def test_drafts_are_limited_to_what_can_be_emitted(
    max_tokens: int, prompt_len: int, k: int | None, expected: int
) -> None:
    bench = Bench(drafts=4, prefill_chunk=64, max_step_tokens=64)
    bench.submit("a", prompt_len, max_tokens=max_tokens, num_draft_tokens=k)
    first, second = bench.step(), bench.step()
    assert first.scheduled[0].num_drafts == 0, "nothing is computed yet that a drafter could start from"
    assert second.scheduled[0] == ScheduledRows(0, prompt_len, 1, expected, True)


@pytest.mark.parametrize(("drafts", "most_steps"), [(0, 9), (15, 18)])
def test_drafts_of_neighbours_hold_up_no_prompt(drafts: int, most_steps: int) -> None:
    """7 sequences with 15 drafts each of 128 rows; without drafts a prompt of 1,024 tokens takes 1,024 / 121 steps."""
    pages = {"sliding": 2000, "full": 2000}
    limits = {"max_num_seqs": 8, "max_step_tokens": 128, "prefill_chunk": 128, "max_model_len": 2000}
    bench = Bench(pages, drafts=drafts, **limits)
    bench.engine.num_correct = lambda *_: 0
    for i in range(7):
        bench.submit(str(i), 2, max_tokens=500)
    bench.step()
    bench.submit("prompt", 1024)
    plans = []
    while not bench.ids("prompt"):
        plans.append(bench.step())
    assert len(plans) <= most_steps
    drafted = [rows.num_drafts for plan in plans[:-1] for rows in plan.scheduled if rows.slot != 7]
    assert len(drafted) == 7 * (len(plans) - 1), "decoding goes on"
    assert min(drafted) == min(drafts, 8), "121 rows: 60 for the prompt, 61 for drafts"


def test_speculation_is_counted_by_what_was_drafted() -> None:
    bench = Bench(drafts=3)
    accepted = iter([3, 0, 2, 1])
    bench.engine.num_correct = lambda _id, _position, num_drafts: next(accepted) if num_drafts else 0
    bench.submit("a", 5, max_tokens=11)
    bench.finish()
    counters = bench.final("a").speculation
    assert counters is not None
    # 1 token at the prefill, then 3 + 1, 0 + 1, 2 + 1, and with 2 tokens left 1 draft: 1 + 1.
    assert (counters.rounds, counters.drafted, counters.accepted) == (4, 10, 6)
    assert counters.accepted_per_position == [3, 2, 1]
    assert bench.scheduler.stats(0.0).speculation == counters
    assert len(bench.ids("a")) == 11


def test_a_stop_inside_accepted_drafts_ends_the_request_there() -> None:
    seed = next(s for s in range(9999) if STOP_ID not in tokens_of(s, 3, 5) and token_at(s, 5) == STOP_ID)
    bench = Bench(drafts=4)
    bench.submit("a", 3, max_tokens=20, seed=seed, stop_token_ids=(STOP_ID,), logprobs=0)
    bench.finish()
    final = bench.final("a")
    assert bench.ids("a") == tokens_of(seed, 3, 6)
    assert (final.finish, final.matched_stop_id) == ("stop_token", STOP_ID)
    assert final.logprobs is not None
    assert [entry.token_id for entry in final.logprobs] == final.token_ids
    assert final.speculation is not None
    assert final.speculation.accepted == 2, "what was trimmed is not counted"
