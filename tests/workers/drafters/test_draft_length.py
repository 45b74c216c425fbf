"""The adaptive draft length: a pure function of measurements, and the controller around it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemray_workers.drafters.controller import DraftLengthController
from gemray_workers.drafters.draft_length import (
    LONG_REST,
    MOST_HELD_UP,
    RETRY_EVERY,
    TRIES,
    Estimates,
    Load,
    choose_draft_length,
)
from gemray_workers.execution.step_clock import StepTimes
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.scheduling.outcome import SequenceOutcome
from gemray_workers.scheduling.plan import ScheduledRows, StepPlan
from gemray_workers.scheduling.request import Sequence
from support.engine.adaptive_run import counters_with_a_wrong_drafter
from support.engine.engine_runner import request

SMALL = Load.of(1, 100)


def test_acceptance_is_doubted_after_a_long_rest() -> None:
    """Texts change: then the first new round counts for a third, where without a rest it counts for a twentieth."""
    known = Estimates(rates=(0.9, 0.9))
    for rest, rates in ((LONG_REST - 1, (0.855, 0.9)), (LONG_REST, (0.6, 0.9))):
        estimates = known
        for _ in range(rest):
            estimates = estimates.with_rest()
        assert estimates.with_acceptance(2, 0).rates == pytest.approx(rates)
    later = estimates.with_acceptance(2, 0).with_acceptance(2, 1)
    assert later.rates == pytest.approx((0.6 + 0.4 / 4, 0.6)), "doubt of a position goes with its measurements"


def simulated(
    *,
    rate: float,
    verify: float,
    draft: float,
    most: int,
    load: Load = SMALL,
    steps: int = 100,
    slow: Mapping[int, float] = MappingProxyType({}),
) -> tuple[Estimates, list[int]]:
    """A server on which a step takes ``verify + draft * k`` seconds, or as `slow` says, and each draft is accepted at
    `rate`.
    """
    estimates, chosen, owed = Estimates(), [], 0.0
    for step in range(steps):
        k = choose_draft_length(estimates, load, most)
        chosen.append(k)
        estimates = estimates.with_decision(load, k).with_step(load, k, slow.get(step, verify + draft * k))
        accepted = 0
        for _ in range(k):  # an error-diffusing stand-in for chance: the rate comes out exactly
            owed += rate
            if owed < 1:
                break
            owed -= 1
            accepted += 1
        estimates = estimates.with_acceptance(k, accepted)
    return estimates, chosen


def test_drafts_many_when_they_are_cheap_and_right() -> None:
    _, chosen = simulated(rate=0.95, verify=20e-3, draft=0.3e-3, most=8)
    assert chosen[-10:] == [8] * 10


def test_stops_when_drafting_costs_more_than_it_gains() -> None:
    _, chosen = simulated(rate=0.3, verify=5e-3, draft=4e-3, most=4)
    assert chosen[-10:] == [0] * 10


def test_stops_for_a_drafter_that_is_always_wrong() -> None:
    _, chosen = simulated(rate=0.0, verify=20e-3, draft=0.5e-3, most=4, steps=200)
    assert chosen[-10:] == [0] * 10


def test_finds_a_length_between_the_measured_ones() -> None:
    """At rate 0.7 with drafts a twelfth of a verify pass, the best of 0..8 is neither 0, 4 nor 8."""
    rate, verify, draft = 0.7, 12e-3, 1e-3
    speeds = [sum(rate**i for i in range(k + 1)) / (verify + draft * k) for k in range(9)]
    _, chosen = simulated(rate=rate, verify=verify, draft=draft, most=8, steps=220)
    settled = set(chosen[-20:])
    assert all(speeds[k] >= 0.97 * max(speeds) for k in settled), (settled, speeds)


@pytest.mark.parametrize("num_slow", [1, 2, 8])
@pytest.mark.parametrize("step", [0, 1, 5, 200, 600, 1021])
def test_slow_steps_do_not_shift_the_choice(step: int, num_slow: int) -> None:
    """0.5 s among 30 ms, some of them in a row: memory that was paged in, or a host that was away. In the 5,000 steps
    behind them the best length is chosen, but for tries; where all that was measured of it was slow, after its next
    try.
    """
    slow = dict.fromkeys(range(step, step + num_slow), 0.5)
    _, chosen = simulated(rate=0.8, verify=30e-3, draft=1e-3, most=4, steps=step + 5020, slow=slow)
    lost = 2 * RETRY_EVERY if step < 2 and num_slow > 1 else 0
    assert chosen[step + 20 :].count(4) >= 5000 - 2 * (5000 // RETRY_EVERY) - lost


def test_steps_that_stay_slow_are_no_accident() -> None:
    """Far slower for good: a card that is throttled."""
    estimates, _ = simulated(rate=0.8, verify=30e-3, draft=1e-3, most=4)
    for _ in range(15):
        estimates = estimates.with_step(SMALL, 4, 500e-3)
    assert choose_draft_length(estimates, SMALL, 4) < 4


@pytest.mark.parametrize("compiling", [range(12), range(200, 200 + MOST_HELD_UP + 2 * TRIES)])
def test_a_step_that_compiled_tells_no_time(compiling: range) -> None:
    """However many there are in a row: a start without graphs compiles in each of its first steps, and later they may
    be more than could be held up."""
    controller = DraftLengthController({"mtp": 4}, adaptive=True)
    chosen = []
    for step in range(400):
        controller.begin_step([running()])
        k = controller(running()).number
        chosen.append(k)
        accepted = 4 if k == 4 else k
        compiles = step in compiling
        decode_step(controller, k, accepted, seconds=0.5 if compiles else 30e-3 + k * 1e-3, compiled=compiles)
    assert chosen[30:].count(4) >= len(chosen) - 30 - 2 * TRIES, "a few tries of other lengths"


def test_a_plain_step_tells_its_time_to_every_drafter() -> None:
    controller = DraftLengthController({"mtp": 4, "dflash": 15}, adaptive=True)
    for k in (0, 4):
        controller.begin_step([running()])
        decode_step(controller, k, 0, seconds=0.03)
    lengths = [{length for _, length in estimates.times} for estimates in controller._estimates]
    assert lengths == [{0, 4}, {0}]


def test_a_slot_that_has_changed_hands_teaches_nothing() -> None:
    """The step was decided for a sequence that has left since; its slot's rows are another one's prompt."""
    controller = DraftLengthController({"mtp": 4}, adaptive=True)
    controller.begin_step([running()])
    prompt = ScheduledRows(slot=0, start=0, num_known=7, num_drafts=0, samples=True)
    outcome = SequenceOutcome(slot=0, token_ids=[1])
    controller.end_step(StepPlan(step=1, scheduled=[prompt]), [outcome], StepTimes(0.0, 1.0))
    assert controller._estimates == [Estimates()]


def test_a_change_for_good_is_noticed() -> None:
    """Steps with 4 drafts become dear; a few of them say so."""
    estimates, chosen = simulated(rate=0.8, verify=30e-3, draft=1e-3, most=4)
    assert chosen[-1] == 4
    for _ in range(8):
        estimates = estimates.with_step(SMALL, 4, 120e-3)
    assert choose_draft_length(estimates, SMALL, 4) < 4


def test_every_load_has_its_own_answer() -> None:
    """Long contexts make a step dear: the same drafter pays at 1k and not at 100k (field report 69)."""
    long = Load.of(1, 100_000)
    estimates, _ = simulated(rate=0.6, verify=10e-3, draft=1e-3, most=4)
    for _ in range(3):
        for k, seconds in ((4, 100e-3), (2, 70e-3), (0, 12e-3)):
            estimates = estimates.with_step(long, k, seconds)
    assert choose_draft_length(estimates, long, 4) == 0
    assert choose_draft_length(estimates, SMALL, 4) > 0


def test_loads_are_classes() -> None:
    assert Load.of(5, 1000) == Load.of(8, 600)
    assert Load.of(8, 600) != Load.of(9, 600)
    assert Load.of(1, 1000) != Load.of(1, 100_000)
    assert Load.of(1, 1000, 200) == Load.of(1, 1000, 100)
    assert len({Load.of(1, 1000, rows).other_rows for rows in (0, 1, 10, 50, 200)}) == 5


def test_tries_other_lengths_again_from_time_to_time() -> None:
    _, chosen = simulated(rate=0.9, verify=20e-3, draft=0.5e-3, most=4, steps=3 * RETRY_EVERY)
    late = chosen[RETRY_EVERY // 2 :]
    assert 0 < sum(k != 4 for k in late) <= 4


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.floats(1e-4, 1.0)), max_size=60),
    st.integers(0, 6),
)
def test_the_answer_is_always_a_length(history: list[tuple[int, int, float]], most: int) -> None:
    estimates = Estimates()
    for drafted, accepted, seconds in history:
        estimates = estimates.with_decision(SMALL, drafted).with_step(SMALL, drafted, seconds)
        estimates = estimates.with_acceptance(drafted, min(drafted, accepted))
    assert 0 <= choose_draft_length(estimates, SMALL, most) <= most
    assert all(0 <= rate <= 1 for rate in estimates.rates)
    assert 1 <= estimates.expected_tokens(most) <= most + 1


def decode_step(
    controller: DraftLengthController, k: int, accepted: int, seconds: float, *, compiled: bool = False
) -> None:
    plan = StepPlan(step=1, scheduled=[ScheduledRows(slot=0, start=9, num_known=1, num_drafts=k, samples=True)])
    outcome = SequenceOutcome(slot=0, token_ids=[1] * (accepted + 1), num_accepted=accepted, num_drafts=k)
    controller.end_step(plan, [outcome], StepTimes(seconds / 2, seconds / 2, compiled=compiled))


def running(num_draft_tokens: int | None = None) -> Sequence:
    params = SamplingParams(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=9, num_draft_tokens=num_draft_tokens
    )
    return Sequence(request_id="a", params=params, tokens=[1, 2, 3], prompt_len=2, arrival=0, num_computed=2, slot=0)


def test_a_request_that_states_a_number_is_not_second_guessed() -> None:
    controller = DraftLengthController({"mtp": 4}, adaptive=True)
    for _ in range(3 * TRIES + 5):
        controller.begin_step([running()])
        k = controller(running()).number
        decode_step(controller, k, 0, seconds=0.01 + k)
    assert controller(running()).number == 0
    assert (
        controller(running(num_draft_tokens=3)).number == 4
    )  # the scheduler takes the least of this and the request's 3


def test_a_fixed_length_stays() -> None:
    controller = DraftLengthController({"mtp": 4}, adaptive=False)
    for _ in range(50):
        controller.begin_step([running()])
        assert controller(running()).number == 4
        decode_step(controller, 4, 0, seconds=10.0)


def test_a_live_engine_stops_drafting_what_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = counters_with_a_wrong_drafter(monkeypatch, [request("a", [5, 6, 7], 120)])
    assert 0 < counters.rounds < 60
