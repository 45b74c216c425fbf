from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemray_workers.errors import CapacityError, InvalidField
from gemray_workers.kv.allocator import PageError
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.messages import SequenceDelta, Submit
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.scheduling.plan import ScheduledRows, StepPlan
from gemray_workers.scheduling.scheduler import Scheduler, SchedulerConfig
from gemray_workers.scheduling.sharing import fair_shares
from support.fake_engine import STOP_ID, FakeEngine, oracle, token_at

MAX_LEN = 64
SPECS = [
    KVGroupSpec("sliding", (0,), 1, 8, 4, 8, torch.float32),
    KVGroupSpec("full", (1,), 1, 8, 4, None, torch.float32),
]
PLENTY = {"sliding": 200, "full": 200}


class Bench:
    """A scheduler and a fake engine, stepped by hand."""

    def __init__(self, num_pages: dict[str, int] | None = None, drafts: int = 0, **config: int) -> None:
        settings = {"max_num_seqs": 4, "max_step_tokens": 32, "prefill_chunk": 16, "max_model_len": MAX_LEN}
        self.config = SchedulerConfig(**{**settings, "max_draft_tokens": drafts, **config})
        self.scheduler = Scheduler(self.config, SPECS, num_pages or PLENTY, lambda _sequence: drafts)
        self.engine = FakeEngine(SPECS)
        self.deltas: list[SequenceDelta] = []

    def submit(self, request_id: str, prompt_len: int, max_tokens: int = 8, **params: object) -> Submit:
        submit = request(request_id, prompt_len, max_tokens, **params)
        self.scheduler.submit(submit)
        return submit

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule() or StepPlan(step=self.scheduler.step)
        self.deltas += self.scheduler.commit(plan, self.engine.run(plan))
        self.scheduler.check_integrity()
        return plan

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def ids(self, request_id: str) -> list[int]:
        return [t for delta in self.deltas if delta.request_id == request_id for t in delta.token_ids]

    def final(self, request_id: str) -> SequenceDelta:
        (final,) = [d for d in self.deltas if d.request_id == request_id and d.finish is not None]
        return final

    @property
    def running(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.running]


def request(request_id: str, prompt_len: int, max_tokens: int = 8, **params: object) -> Submit:
    emitted = params.pop("emitted_ids", [])
    defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": sum(request_id.encode())}
    return Submit(
        request_id=request_id,
        prompt_ids=list(range(prompt_len)),
        params=SamplingParams(**{**defaults, "max_tokens": max_tokens, **params}),
        emitted_ids=emitted,
    )


def tokens_of(seed: int, first: int, end: int) -> list[int]:
    return [token_at(seed, position) for position in range(first, end)]


def rows_by_slot(plan: StepPlan) -> dict[int, ScheduledRows]:
    return {rows.slot: rows for rows in plan.rows}


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
        ({"max_step_tokens": 11, "max_draft_tokens": 2}, "max_step_tokens"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_draft_tokens": -1}, "max_draft_tokens"),
        ({"admission_headroom": -1}, "admission_headroom"),
    ],
)
def test_config_names_the_wrong_field(changes: dict[str, int], field: str) -> None:
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
    assert sorted(rows.num_known for rows in plan.rows) == [2, 3, 3]
    assert bench.step().rows[-1].samples
    assert bench.ids("short")


# Rows


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
    assert first.rows[0].num_drafts == 0, "nothing is computed yet that a drafter could start from"
    assert second.rows[0] == ScheduledRows(0, prompt_len, 1, expected, True)


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


def iter_admissions(bench: Bench):
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
    assert bench.step().rows == []
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
    bench.submit("a", 6, 12, emitted_ids=whole[:num_emitted], prompt_logprobs=0)
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


def test_prompt_logprobs_come_once_and_with_the_first_token() -> None:
    bench = Bench(prefill_chunk=7)
    bench.submit("a", 20, prompt_logprobs=2)
    plans = [bench.step() for _ in range(4)]
    assert [plan.rows[0].prompt_logprobs_from for plan in plans] == [1, 8, 15, None]
    assert bench.deltas[0].prompt_logprobs is not None
    assert [entry.logprob for entry in bench.deltas[0].prompt_logprobs] == [-float(p) for p in range(1, 20)]
    assert bench.deltas[1].prompt_logprobs is None


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    bench = Bench()
    bench.submit("a", 1, prompt_logprobs=2)
    assert bench.step().rows[0].prompt_logprobs_from is None
    assert bench.deltas[0].prompt_logprobs is None


def test_idle_plans_nothing_and_the_last_release_is_told() -> None:
    bench = Bench()
    assert bench.scheduler.schedule() is None
    bench.submit("a", 3, max_tokens=1)
    bench.step()
    assert bench.scheduler.has_work
    plan = bench.step()
    assert (plan.released, plan.rows, plan.freed_pages) == ([0], [], {"sliding": [1], "full": [1]})
    assert not bench.scheduler.has_work
    assert bench.scheduler.schedule() is None


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
