"""Who drafts: a pure function of what was measured of each drafter, and the controller around it."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemray_workers.drafters.controller import DraftLengthController
from gemray_workers.drafters.draft_length import RETRY_EVERY, Estimates, Load
from gemray_workers.drafters.drafter_choice import PROBE_STEPS, choose_drafter, choose_drafts
from gemray_workers.execution.step_clock import StepTimes
from gemray_workers.sampling.params import DraftMethod, SamplingParams
from gemray_workers.scheduling.outcome import SequenceOutcome
from gemray_workers.scheduling.plan import ScheduledRows, StepPlan
from gemray_workers.scheduling.request import Sequence
from gemray_workers.scheduling.shares import Drafts

MOST = (4, 15)
"""Drafts of MTP and DFlash."""
SMALL, LARGE = Load.of(1, 500), Load.of(32, 500)
RETRIES = 2 * RETRY_EVERY


@dataclass
class Server:
    """Made-up acceptance and step times. A step takes `verify_s` and `row_s` for each row; MTP drafts in steps, DFlash
    in one pass."""

    rates: tuple[float, float]
    load: Load = SMALL
    num_sequences: int = 1
    verify_s: float = 10e-3
    row_s: float = 0.0
    draft_s: tuple[float, float] = (0.5e-3, 2e-3)
    """A step of MTP, a pass of DFlash."""
    is_adaptive: bool = True
    estimates: list[Estimates] = field(default_factory=lambda: [Estimates(), Estimates()])
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def run(self, steps: int) -> list[Drafts]:
        return [self._step() for _ in range(steps)]

    def seconds(self, drafts: Drafts) -> float:
        drafting = (drafts.number * self.draft_s[0], self.draft_s[1] * (drafts.number > 0))[drafts.drafter]
        return self.verify_s + drafting + self.row_s * self.num_sequences * (1 + drafts.number)

    def tokens(self, drafts: Drafts) -> float:
        return sum(self.rates[drafts.drafter] ** i for i in range(drafts.number + 1))

    def best(self) -> float:
        """Tokens a second of the best choice there is."""
        options = [Drafts(k, d) for d, most in enumerate(MOST) for k in range(most + 1)]
        return max(self.tokens(o) / self.seconds(o) for o in options)

    def _step(self) -> Drafts:
        choose = choose_drafts if self.is_adaptive else choose_drafter
        drafts = choose(self.estimates, self.load, MOST)
        own = self.estimates[drafts.drafter].with_decision(self.load, drafts.number)
        for _ in range(self.num_sequences):
            own = own.with_acceptance(drafts.number, self._accepted(drafts))
        self.estimates[drafts.drafter] = own
        for d in (0, 1):
            if d != drafts.drafter or drafts.number == 0:
                self.estimates[d] = self.estimates[d].with_rest()
        for d in (0, 1) if drafts.number == 0 else (drafts.drafter,):
            self.estimates[d] = self.estimates[d].with_step(self.load, drafts.number, self.seconds(drafts))
        return drafts

    def _accepted(self, drafts: Drafts) -> int:
        wrong = (i for i in range(drafts.number) if self.chance.random() >= self.rates[drafts.drafter])
        return next(wrong, drafts.number)


def settled(chosen: list[Drafts]) -> Drafts:
    """What most of the last steps had."""
    last = chosen[-60:]
    return max(set(last), key=last.count)


CASES: dict[str, tuple[Server, int | None]] = {
    "both right, long blocks are cheap": (Server((0.9, 0.9)), 1),
    "only MTP is right": (Server((0.8, 0.2)), 0),
    "only DFlash is right": (Server((0.1, 0.8)), 1),
    "DFlash is a little better, at a high price": (Server((0.7, 0.75), draft_s=(0.2e-3, 9e-3)), 0),
    "MTP is better, at a high price": (Server((0.8, 0.7), draft_s=(6e-3, 1e-3)), 1),
    "both are wrong": (Server((0.0, 0.0)), None),
    "both cost more than they give": (Server((0.3, 0.3), draft_s=(8e-3, 20e-3)), None),
    "rows are dear in a large batch": (Server((0.8, 0.8), LARGE, 32, row_s=0.05e-3, draft_s=(0.1e-3, 9e-3)), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_drafter_that_pays_most_drafts(name: str) -> None:
    server, expected = CASES[name]
    fresh = Server(server.rates, server.load, server.num_sequences, server.verify_s, server.row_s, server.draft_s)
    chosen = settled(fresh.run(400))
    if expected is None:
        assert chosen.number == 0
    else:
        assert chosen.drafter == expected
        assert chosen.number > 0
    assert fresh.tokens(chosen) / fresh.seconds(chosen) >= 0.93 * fresh.best()


def test_every_batch_size_has_its_own_answer() -> None:
    """One sequence: long blocks. Many: each row costs, and a block has most."""
    server = Server((0.7, 0.8), row_s=0.2e-3)
    assert settled(server.run(300)).drafter == 1
    server.load, server.num_sequences, server.draft_s = LARGE, 32, (0.5e-3, 60e-3)
    assert settled(server.run(300)).drafter == 0
    server.load, server.num_sequences, server.draft_s = SMALL, 1, (0.5e-3, 2e-3)
    assert settled(server.run(100)).drafter == 1


@pytest.mark.parametrize("num_sequences", [1, 8])
@pytest.mark.parametrize("is_adaptive", [True, False])
def test_the_mind_is_changed_when_texts_change(is_adaptive: bool, num_sequences: int) -> None:
    server = Server((0.85, 0.1), num_sequences=num_sequences, is_adaptive=is_adaptive)
    assert settled(server.run(RETRIES)).drafter == 0
    server.rates = (0.85, 0.97)
    assert settled(server.run(RETRIES)).drafter == 1
    server.rates = (0.85, 0.05)
    assert settled(server.run(100)).drafter == 0, "the one that drafts is noticed at once"


@pytest.mark.parametrize("is_adaptive", [True, False])
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((0.85, 0.1), (0.85, 0.97), 1),
        ((0.85, 0.1), (0.85, 0.92), 1),
        ((0.1, 0.6), (0.9, 0.6), 0),
        ((0.1, 0.9), (0.9, 0.1), 0),
    ],
)
def test_one_sequence_finds_the_better_drafter_again_within_a_turn(
    before: tuple[float, float], after: tuple[float, float], expected: int, is_adaptive: bool
) -> None:
    """What was measured of it is old by then: the few drafts of a trial say more."""
    server = Server(before, is_adaptive=is_adaptive)
    server.run(RETRIES + 100)
    server.rates = after
    assert settled(server.run(2 * RETRIES)).drafter == expected


@pytest.mark.parametrize("rates", [(0.85, 0.1), (0.85, 0.5), (0.3, 0.9), (0.0, 0.0)])
def test_trials_cost_less_than_a_fiftieth(rates: tuple[float, float]) -> None:
    server = Server(rates)
    server.run(RETRIES)
    chosen = server.run(3 * RETRIES)
    found = sum(map(server.tokens, chosen)) / sum(map(server.seconds, chosen))
    assert found >= 0.98 * server.best()


def test_the_other_drafter_is_tried_for_a_few_steps_in_a_row() -> None:
    server = Server((0.9, 0.1))
    chosen = server.run(6 * RETRY_EVERY)[100:]
    others = [i for i, drafts in enumerate(chosen) if drafts.drafter == 1]
    assert 3 * PROBE_STEPS <= len(others) <= 4 * PROBE_STEPS
    assert sum(b - a == 1 for a, b in itertools.pairwise(others)) >= 3 * (PROBE_STEPS - 1)


def test_a_drafter_that_gains_nothing_is_not_measured_under_each_load() -> None:
    bad = Estimates()
    for _ in range(100):
        bad = bad.with_acceptance(15, 0).with_step(SMALL, 0, 1.0).with_step(SMALL, 15, 2.0).with_step(SMALL, 8, 1.5)
    chosen = [choose_drafts([Estimates(), bad], Load.of(n, 10**n), MOST) for n in range(1, 6)]
    assert all(drafts == Drafts(4, 0) for drafts in chosen)


def test_with_fixed_numbers_only_the_drafter_is_chosen() -> None:
    server = Server((0.3, 0.9), is_adaptive=False)
    chosen = server.run(RETRY_EVERY)
    assert {(d.number, d.drafter) for d in chosen} == {(4, 0), (15, 1)}
    assert settled(chosen[:-PROBE_STEPS]) == Drafts(15, 1)
    assert [drafts.drafter for drafts in server.run(RETRY_EVERY)].count(0) == PROBE_STEPS


def test_numbers_that_no_step_reaches_are_judged_by_acceptance() -> None:
    good = bad = Estimates()
    for _ in range(50):
        good, bad = good.with_acceptance(15, 15), bad.with_acceptance(4, 0)
        good, bad = good.with_decision(SMALL, 15), bad.with_decision(SMALL, 4)
    assert choose_drafter([bad, good], SMALL, MOST) == Drafts(15, 1)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 6), st.integers(0, 6), st.floats(1e-4, 1.0)), max_size=60),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
)
def test_the_answer_is_always_a_drafter_and_a_length_of_its_own(
    history: list[tuple[int, int, int, float]], most: tuple[int, int]
) -> None:
    estimates = [Estimates(), Estimates()]
    for drafter, drafted, accepted, seconds in history:
        own = estimates[drafter].with_decision(SMALL, drafted).with_step(SMALL, drafted, seconds)
        estimates[drafter] = own.with_acceptance(drafted, min(drafted, accepted))
    chosen = choose_drafts(estimates, SMALL, most)
    assert 0 <= chosen.number <= most[chosen.drafter]
    fixed = choose_drafter(estimates, SMALL, most)
    assert fixed.number == most[fixed.drafter]


def sequence(slot: int, method: DraftMethod, num_draft_tokens: int | None = None) -> Sequence:
    params = SamplingParams(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        max_tokens=9,
        draft_method=method,
        num_draft_tokens=num_draft_tokens,
    )
    return Sequence(
        request_id=f"{slot}", params=params, tokens=[1] * 10, prompt_len=9, arrival=slot, num_computed=9, slot=slot
    )


def run_controller(
    controller: DraftLengthController, running: list[Sequence], steps: int, accepted: tuple[int, int]
) -> list[list[Drafts]]:
    """What each sequence got, step by step, when the drafters' drafts are right up to these numbers."""
    found = []
    for step in range(steps):
        controller.begin_step(running)
        got = [controller(s) for s in running]
        rows = [
            ScheduledRows(
                slot=s.running_slot, start=9, num_known=1, num_drafts=d.number, samples=True, drafter=d.drafter
            )
            for s, d in zip(running, got, strict=True)
        ]
        outcomes = []
        for r in rows:
            right = min(accepted[r.drafter], r.num_drafts)
            outcomes.append(SequenceOutcome(r.slot, [1] * (right + 1), right, r.num_drafts))
        steps_of_mtp = max((r.num_drafts for r in rows if r.drafter == 0), default=0)
        has_block = any(r.num_drafts for r in rows if r.drafter == 1)
        num_rows = sum(1 + r.num_drafts for r in rows)
        times = StepTimes(1e-3 * steps_of_mtp + 3e-3 * has_block, 20e-3 + 0.1e-3 * num_rows)
        controller.end_step(StepPlan(step=step, scheduled=rows), outcomes, times)
        found.append(got)
    return found


def test_requests_get_the_drafter_that_they_name() -> None:
    controller = DraftLengthController({"mtp": 4, "dflash": 15}, adaptive=True)
    running = [
        sequence(0, "auto"),
        sequence(1, "mtp"),
        sequence(2, "dflash"),
        sequence(3, "none"),
        sequence(4, "dflash", 2),
        sequence(5, "auto", 2),
    ]
    steps = run_controller(controller, running, 200, accepted=(4, 15))
    auto, mtp, dflash, none, stated, auto_stated = steps[-20]
    assert auto == Drafts(15, 1), "blocks of 15 that are always right"
    assert mtp == Drafts(4, 0)
    assert dflash == Drafts(15, 1)
    assert none.number == 0
    assert stated == auto_stated == Drafts(15, 1), "the scheduler takes the least of this and the request's 2"
    assert all(got[1].drafter == 0 and got[2].drafter == 1 and got[3].number == 0 for got in steps)


def test_a_named_drafter_that_is_wrong_stops_drafting_and_the_other_goes_on() -> None:
    controller = DraftLengthController({"mtp": 4, "dflash": 15}, adaptive=True)
    running = [sequence(0, "auto"), sequence(1, "dflash")]
    auto, dflash = run_controller(controller, running, 200, accepted=(4, 0))[-20]
    assert auto == Drafts(4, 0)
    assert dflash.number == 0


def test_the_server_may_change_its_mind() -> None:
    controller = DraftLengthController({"mtp": 4, "dflash": 15}, adaptive=True)
    running = [sequence(0, "auto"), sequence(1, "auto")]
    assert run_controller(controller, running, 300, accepted=(4, 0))[-1][0] == Drafts(4, 0)
    assert run_controller(controller, running, 5 * RETRIES, accepted=(4, 15))[-20][0] == Drafts(15, 1)


def test_fixed_numbers_leave_the_choice_of_the_drafter() -> None:
    controller = DraftLengthController({"mtp": 4, "dflash": 15}, adaptive=False)
    running = [sequence(0, "auto"), sequence(1, "mtp")]
    auto, mtp = run_controller(controller, running, 100, accepted=(0, 15))[-1]
    assert (auto, mtp) == (Drafts(15, 1), Drafts(4, 0))


def test_a_drafter_that_never_guesses_is_named(caplog: pytest.LogCaptureFixture) -> None:
    controller = DraftLengthController({"mtp": 4, "dflash": 15}, adaptive=False)
    run_controller(controller, [sequence(0, "dflash"), sequence(1, "mtp")], 300, accepted=(4, 0))
    assert "dflash: 0 of" in caplog.text
    assert caplog.text.count("Likely causes") == 1
