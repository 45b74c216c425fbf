"""The scheduler when pages run out, requests end early, and gangs are rebuilt."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest

from gemray_workers.kv.allocator import PageError
from gemray_workers.scheduling.plan import Admission, ScheduledRows
from support.scheduling.fake_engine import STOP_ID, oracle
from support.scheduling.scheduler_bench import MAX_LEN, PLENTY, Bench, request, rows_by_slot

# Pages


def test_out_of_pages_preempts_the_newest_and_changes_no_id() -> None:
    bench = Bench({"sliding": 30, "full": 16}, admission_headroom=0)
    submits = {name: bench.submit(name, 10, max_tokens=40) for name in "abcd"}
    while not bench.scheduler.stats(0.0).num_preemptions:
        before = bench.running
        plan = bench.step()
    assert before == ["a", "b", "c", "d"]
    assert bench.running == ["a", "b", "c"]
    assert 3 not in rows_by_slot(plan)
    back = next(admission for admission in iter_admissions(bench) if admission.request_id == "d")
    assert back.prompt_len == 10
    assert len(back.token_ids) > 10
    bench.finish()
    for name, submit in submits.items():
        assert bench.ids(name) == oracle(submit, MAX_LEN)[0]
    ends = [delta.request_id for delta in bench.deltas if delta.finish]
    assert ends == ["a", "b", "c", "d"]


def iter_admissions(bench: Bench) -> Iterator[Admission]:
    while True:
        yield from bench.step().admitted


def test_field_report_66_ten_pages_five_requests_of_four_with_drafts() -> None:
    bench = Bench({"sliding": 10, "full": 10}, drafts=2, max_num_seqs=5, max_model_len=16, admission_headroom=0)
    submits = [bench.submit(str(i), 4, max_tokens=12) for i in range(5)]
    bench.finish()
    for submit in submits:
        assert bench.ids(submit.request_id) == oracle(submit, 16)[0]


@pytest.mark.parametrize("seed", range(20))
def test_ids_are_the_same_under_page_pressure(seed: int) -> None:
    rng = random.Random(seed)
    spare = rng.choice([0, 1, 4])
    bench = Bench(
        {"sliding": 7 + rng.choice([0, 9, 40]), "full": 16 + spare},
        drafts=rng.choice([0, 3]),
        max_num_seqs=6,
        prefill_chunk=rng.choice([3, 16]),
        admission_headroom=0,
    )
    bench.engine.num_correct = lambda _id, _position, num_drafts: rng.randint(0, num_drafts)
    submits = [bench.submit(str(i), rng.randint(1, 12), max_tokens=rng.randint(20, 50)) for i in range(12)]
    bench.finish()
    for submit in submits:
        assert bench.ids(submit.request_id) == oracle(submit, MAX_LEN)[0]
    assert bench.scheduler.stats(0.0).num_preemptions > 0
    assert not any(bench.scheduler.ledger.pages_in_use.values())


def test_drafts_take_only_pages_that_are_left() -> None:
    """With headroom for one token and no page free, decoding goes on without drafts and preempts nobody for them."""
    bench = Bench({"sliding": 30, "full": 5}, drafts=3, max_model_len=20, prefill_chunk=4, admission_headroom=0)
    bench.engine.num_correct = lambda *_: 0
    bench.submit("a", 8, max_tokens=4, num_draft_tokens=0)
    bench.submit("b", 6, max_tokens=4)
    bench.step()
    bench.step()
    plan = bench.step()
    assert bench.scheduler.ledger.pages_in_use["full"] == 5
    assert rows_by_slot(plan)[1] == ScheduledRows(1, 6, 1, 1, True), "room for one draft in the last page"
    assert bench.scheduler.stats(0.0).num_preemptions == 0


def test_integrity_check_sees_a_leak() -> None:
    bench = Bench()
    bench.submit("a", 4)
    bench.step()
    bench.scheduler.ledger._allocators["full"].allocate(2)
    with pytest.raises(PageError, match=r"group full: pages \[2, 3\] are owned by no sequence"):
        bench.scheduler.check_integrity()


def test_integrity_check_sees_a_page_with_two_owners() -> None:
    bench = Bench()
    bench.submit("a", 4)
    bench.submit("b", 4)
    bench.step()
    tables = bench.scheduler.ledger._tables
    tables[1]["full"]._pages[0] = tables[0]["full"].pages[0]
    with pytest.raises(PageError, match="group full: page 1 is owned by slots 0 and 1"):
        bench.scheduler.check_integrity()


# Ends


def test_cancel_frees_slot_and_pages_within_a_step() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit("a", 20, max_tokens=30)
    bench.submit("b", 3)
    bench.submit("c", 3)
    for _ in range(4):
        bench.step()
    bench.scheduler.cancel("a")
    bench.scheduler.cancel("b")
    bench.scheduler.cancel("unknown")
    plan = bench.step()
    assert plan.released == [0]
    assert [admission.request_id for admission in plan.admitted] == ["c"]
    assert bench.final("a").finish == bench.final("b").finish == "cancelled"
    assert len(plan.freed_pages["full"]) == 6
    assert bench.scheduler.ledger.pages_in_use == {"sliding": 1, "full": 1}
    bench.finish()
    assert len(bench.ids("c")) == 8


def test_cancel_all_leaves_nothing() -> None:
    bench = Bench()
    for name in "abcdef":
        bench.submit(name, 5)
    bench.step()
    bench.scheduler.cancel_all()
    assert bench.step().scheduled == []
    assert not bench.scheduler.has_work
    assert {bench.final(name).finish for name in "abcdef"} == {"cancelled"}
    assert bench.scheduler.schedule() is None


def test_a_fault_ends_its_request_alone() -> None:
    bench = Bench()
    bench.engine.faults.add("b")
    submit = bench.submit("a", 5)
    bench.submit("b", 40)
    bench.finish()
    assert bench.ids("a") == oracle(submit, MAX_LEN)[0]
    assert (bench.final("b").finish, bench.final("b").fault) == ("fault", "NaN logits")
    assert bench.ids("b") == []


@pytest.mark.parametrize("num_emitted", [1, 5, 11])
def test_replayed_tokens_count_but_are_not_emitted_again(num_emitted: int) -> None:
    whole, _ = oracle(request("a", 6, 12), MAX_LEN)
    bench = Bench()
    bench.submit("a", 6, 12, emitted_ids=whole[:num_emitted], num_prompt_logprobs=5, prompt_logprobs=0)
    bench.finish()
    assert bench.ids("a") == whole[num_emitted:]
    assert bench.final("a").finish == "length"
    assert bench.engine.reported_prompt_positions == {}
    assert bench.scheduler.stats(0.0).generated_tokens == 12 - num_emitted


def test_a_replay_that_was_complete_only_ends() -> None:
    whole, _ = oracle(request("a", 6, 12), MAX_LEN)
    bench = Bench()
    bench.submit("a", 6, 12, emitted_ids=whole)
    bench.submit("b", 6, 99, emitted_ids=[5, 7, STOP_ID], stop_token_ids=(STOP_ID,))
    bench.finish()
    assert (bench.final("a").finish, bench.ids("a")) == ("length", [])
    assert (bench.final("b").finish, bench.final("b").matched_stop_id) == ("stop_token", STOP_ID)
    assert bench.scheduler.step == 0


def test_prompt_logprobs_come_once_and_with_each_chunk() -> None:
    bench = Bench(prefill_chunk=7)
    bench.submit("a", 20, prompt_logprobs=2)
    plans = [bench.step() for _ in range(4)]
    assert [plan.scheduled[0].prompt_logprobs_from for plan in plans] == [1, 8, 15, None]
    found = [[entry.logprob for entry in delta.prompt_logprobs or []] for delta in bench.deltas]
    assert found == [[-float(p) for p in chunk] for chunk in (range(1, 8), range(8, 15), range(15, 20), ())]
    assert [len(delta.token_ids) for delta in bench.deltas] == [0, 0, 1, 1]


def test_a_replay_goes_on_with_the_prompt_logprobs_that_the_client_lacks() -> None:
    bench = Bench(prefill_chunk=7)
    bench.submit("a", 20, 1, prompt_logprobs=2, num_prompt_logprobs=9)
    bench.finish()
    assert [entry.logprob for delta in bench.deltas for entry in delta.prompt_logprobs or []] == [
        -float(p) for p in range(10, 20)
    ]


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    bench = Bench()
    bench.submit("a", 1, prompt_logprobs=2)
    assert bench.step().scheduled[0].prompt_logprobs_from is None
    assert bench.deltas[0].prompt_logprobs is None


def test_idle_plans_nothing_and_the_last_release_is_told() -> None:
    bench = Bench()
    assert bench.scheduler.schedule() is None
    bench.submit("a", 3, max_tokens=1)
    bench.step()
    assert bench.scheduler.has_work
    plan = bench.step()
    assert (plan.released, plan.scheduled, plan.freed_pages) == ([0], [], {"sliding": [1], "full": [1]})
    assert (bench.scheduler.has_work, bench.scheduler.schedule()) == (False, None)


def test_stats() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit("a", 20, max_tokens=3)
    bench.submit("b", 3)
    bench.step()
    bench.step()
    stats = bench.scheduler.stats(last_step_seconds=0.25)
    assert (stats.step, stats.num_running, stats.num_waiting) == (2, 1, 1)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.last_step_seconds) == (20, 1, 0.25)
    assert stats.pages_in_use == {"sliding": 2, "full": 5}
    assert stats.pages_total == PLENTY


def test_freed_pages_travel_only_to_those_who_poison_them() -> None:
    """A plan that frees 500 pages is as small as one that frees none."""
    sizes = []
    for tells in (False, True):
        bench = Bench({"sliding": 500, "full": 500}, max_model_len=2000, tells_freed_pages=tells)
        bench.submit("a", 1900, max_tokens=1)
        while (plan := bench.step()).scheduled:
            pass
        sizes.append(len(msgspec.msgpack.encode(plan)))
    assert plan.released == [0]
    assert sizes[0] < 20
    assert sizes[1] > 1000
