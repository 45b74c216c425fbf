"""The adaptive draft length in steps whose sequences are not alike: neighbours, prompts, limits, other texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from gemray_workers.drafters.controller import DraftLengthController
from gemray_workers.drafters.draft_length import PATIENCE, RETRY_EVERY, TRIES, Estimates, Load, choose_draft_length
from gemray_workers.execution.step_clock import StepTimes
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.scheduling.outcome import SequenceOutcome
from gemray_workers.scheduling.plan import ScheduledRows, StepPlan
from gemray_workers.scheduling.request import Sequence
from support.engine.adaptive_run import DRAFT_S, VERIFY_S, counters_with_a_wrong_drafter
from support.engine.engine_runner import request

MOST = 4
ROW_S = 0.1e-3


@dataclass
class Server:
    """Steps of one controller: sequences that it decides for, those that it does not, and made-up times."""

    num_sequences: int = 1
    context: int = 100
    stated: tuple[int, ...] = ()
    """Drafts of requests that state a number."""
    prefill: Callable[[int], int] = lambda _step: 0
    """Prompt rows of step i."""
    limit: int = MOST
    """Most drafts that the scheduler gives, whatever is asked."""
    accepted: int = 0
    """Most drafts of a round that are accepted."""
    seconds: Callable[[int, int], StepTimes] = lambda k, rows: StepTimes(DRAFT_S * k, VERIFY_S + ROW_S * rows)
    """From the most drafts of a sequence and the rows of the step."""
    controller: DraftLengthController = field(
        default_factory=lambda: DraftLengthController({"mtp": MOST}, adaptive=True)
    )
    step: int = 0

    def run(self, steps: int) -> list[int]:
        """Drafts that each of the adaptive sequences got, by step."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> int:
        context = self.context
        adaptive = [_sequence(slot, context, None) for slot in range(self.num_sequences)]
        stated = [_sequence(len(adaptive) + i, context, k) for i, k in enumerate(self.stated)]
        self.controller.begin_step([*adaptive, *stated])
        rows = [_decode(s.running_slot, context, min(self.limit, self.controller(s).number)) for s in adaptive]
        got = rows[0].num_drafts
        for sequence in stated:
            assert sequence.params.num_draft_tokens is not None
            k = min(self.controller(sequence).number, sequence.params.num_draft_tokens)
            rows.append(_decode(sequence.running_slot, context, k))
        prompt_rows = self.prefill(self.step)
        if prompt_rows:
            rows.append(ScheduledRows(slot=20, start=0, num_known=prompt_rows, num_drafts=0, samples=False))
        outcomes = []
        for r in rows:
            accepted = min(self.accepted, r.num_drafts)
            outcomes.append(SequenceOutcome(r.slot, [1] * (accepted + 1) if r.samples else [], accepted, r.num_drafts))
        times = self.seconds(max(r.num_drafts for r in rows), sum(r.num_known + r.num_drafts for r in rows))
        self.controller.end_step(StepPlan(step=self.step, scheduled=rows), outcomes, times)
        self.step += 1
        return got


def _sequence(slot: int, context: int, num_draft_tokens: int | None) -> Sequence:
    params = SamplingParams(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=9, num_draft_tokens=num_draft_tokens
    )
    tokens = [1] * (context + 1)
    return Sequence(
        request_id=str(slot),
        params=params,
        tokens=tokens,
        prompt_len=context,
        arrival=slot,
        num_computed=context,
        slot=slot,
    )


def _decode(slot: int, context: int, num_drafts: int) -> ScheduledRows:
    return ScheduledRows(slot=slot, start=context, num_known=1, num_drafts=num_drafts, samples=True)


MIXED = {
    "uniform": Server(),
    "a neighbour without drafts": Server(stated=(0,)),
    "a neighbour with one": Server(stated=(1,)),
    "neighbours with more": Server(stated=(1, 2, 1)),
    "a prompt in each step": Server(prefill=lambda _step: 64),
    "a prompt in every other step": Server(prefill=lambda step: 64 * (step % 2)),
    "a prompt now and then": Server(prefill=lambda step: 64 * (step % 7 == 0)),
    "prompts of all lengths": Server(prefill=lambda step: (0, 3, 64, 20, 200)[step % 5]),
    "fewer drafts than asked": Server(limit=2),
    "one draft at most": Server(limit=1),
    "limit, neighbour and prompt": Server(limit=3, stated=(1,), prefill=lambda step: step % 50),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_drafter_that_is_always_wrong_is_stopped_in_any_company(name: str) -> None:
    server = MIXED[name]
    fresh = Server(stated=server.stated, prefill=server.prefill, limit=server.limit)
    assert sum(fresh.run(200)) <= 250
    assert sum(fresh.run(50)[-20:]) == 0


@pytest.mark.parametrize("name", MIXED)
def test_a_good_drafter_drafts_all_it_may_in_any_company(name: str) -> None:
    server = MIXED[name]
    fresh = Server(stated=server.stated, prefill=server.prefill, limit=server.limit, accepted=MOST)
    drafts = fresh.run(400)[-100:]
    assert sum(k == server.limit for k in drafts) >= 95, drafts


def test_a_neighbour_does_not_make_a_wrong_drafter_look_right() -> None:
    """Acceptance is judged by the sequences that the choice is for."""
    controller = DraftLengthController({"mtp": MOST}, adaptive=True)
    for step in range(200):
        controller.begin_step([_sequence(0, 100, None), _sequence(1, 100, MOST)])
        rows = [_decode(0, 100, controller(_sequence(0, 100, None)).number), _decode(1, 100, MOST)]
        outcomes = [SequenceOutcome(0, [1], 0, rows[0].num_drafts), SequenceOutcome(1, [1] * (MOST + 1), MOST, MOST)]
        controller.end_step(
            StepPlan(step=step, scheduled=rows), outcomes, StepTimes(4e-3, 10e-3 + 1e-3 * rows[0].num_drafts)
        )
    assert controller(_sequence(0, 100, None)).number == 0


@pytest.mark.parametrize("stated", [(), (0,), (1,)])
def test_drafts_again_when_the_text_becomes_predictable(stated: tuple[int, ...]) -> None:
    server = Server(stated=stated)
    assert server.run(300)[-20:] == [0] * 20
    server.accepted = MOST
    drafts = server.run(10 * RETRY_EVERY)
    assert sum(k == MOST for k in drafts[-200:]) >= 198


@pytest.mark.parametrize("stated", [(), (0,), (1,)])
def test_a_retry_is_one_step_in_any_company(stated: tuple[int, ...]) -> None:
    server = Server(stated=stated)
    server.run(RETRY_EVERY - 20)
    drafts = server.run(2 * RETRY_EVERY)
    assert 1 <= sum(k > 0 for k in drafts) <= 4, [i for i, k in enumerate(drafts) if k]


def test_a_prompt_beside_it_does_not_count_as_the_time_of_a_length() -> None:
    """Steps with a long prompt are much slower; the length that ran then must not lose to one that did not."""
    server = Server(prefill=lambda step: 200 * (step > 100 and step % 10 == 0), accepted=MOST)
    server.seconds = lambda k, rows: StepTimes(DRAFT_S * k, VERIFY_S * (20 if rows > 100 else 1))
    assert sum(k < MOST for k in server.run(600)[150:]) <= 4 * PATIENCE


def test_a_length_that_no_step_reaches_is_not_waited_for() -> None:
    load, estimates, chosen = Load.of(1, 100), Estimates(), []
    for _ in range(40):
        k = choose_draft_length(estimates, load, MOST)
        chosen.append(k)
        had = min(k, 1)
        estimates = estimates.with_decision(load, k).with_step(load, had, 1.0 + 0.01 * had)
    assert chosen.count(MOST) == PATIENCE
    assert set(chosen[-10:]) == {1}


def test_a_load_that_is_never_met_borrows_the_times_of_the_nearest() -> None:
    expected, far, other = Load.of(1, 100, 64), Load.of(64, 100_000), Load.of(1, 100)
    estimates = Estimates()
    for _ in range(TRIES):
        for k in (0, 2, MOST):
            estimates = estimates.with_step(other, k, 1.0 + 0.01 * k).with_step(far, k, 1.0 + 10.0 * k)
    for _ in range(3 * PATIENCE):
        estimates = estimates.with_decision(expected, choose_draft_length(estimates, expected, MOST))
    assert choose_draft_length(estimates, expected, MOST) == MOST


def test_without_any_time_acceptance_decides() -> None:
    load = Load.of(1, 100)
    good = bad = Estimates()
    for _ in range(3 * PATIENCE):
        good = good.with_decision(load, choose_draft_length(good, load, MOST)).with_acceptance(MOST, MOST)
        bad = bad.with_decision(load, choose_draft_length(bad, load, MOST)).with_acceptance(MOST, 0)
    for _ in range(60):
        bad = bad.with_acceptance(MOST, 0)
    assert choose_draft_length(good, load, MOST) == MOST
    assert choose_draft_length(bad, load, MOST) == 0


def test_what_cannot_pay_is_not_measured_anew_under_each_load() -> None:
    estimates = Estimates()
    for _ in range(100):
        estimates = estimates.with_acceptance(MOST, 0)
    assert [choose_draft_length(estimates, Load.of(n, 10**n), MOST) for n in range(1, 6)] == [0] * 5


@pytest.mark.parametrize("stated", [0, 1])
def test_a_live_engine_stops_drafting_beside_a_request_with_a_number(
    stated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    submits = [request("a", [5, 6, 7], 120), request("b", [8, 9], 120, num_draft_tokens=stated)]
    counters = counters_with_a_wrong_drafter(monkeypatch, submits)
    assert 0 < counters.rounds < 80
