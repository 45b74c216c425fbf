"""The warning about a drafter that hardly ever guesses right, whether it goes on drafting or is given up."""

from __future__ import annotations

import logging
import re

import pytest

from gemray_workers.drafters.acceptance_alarm import MIN_DRAFTS, MIN_ROUNDS_GIVEN_UP, AcceptanceAlarm
from gemray_workers.drafters.controller import DraftLengthController
from gemray_workers.execution.step_clock import StepTimes
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.scheduling.outcome import SequenceOutcome
from gemray_workers.scheduling.plan import ScheduledRows, StepPlan
from gemray_workers.scheduling.request import Sequence
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant
from support.engine.engine_runner import engine_config, request, run_engine


def alarms(rounds: list[tuple[int, int]]) -> list[str]:
    alarm = AcceptanceAlarm()
    warnings = [alarm.observe(drafted=drafted, accepted=accepted) for drafted, accepted in rounds]
    return [warning for warning in warnings if warning is not None]


def test_names_likely_causes_once() -> None:
    assert alarms([(4, 0)] * 249) == []
    (warning,) = alarms([(4, 0)] * 5000)
    assert "0 of 1000 drafts were accepted (0.0%) in 250 rounds" in warning
    assert "block table" in warning


def test_sounds_again_after_better_times() -> None:
    assert len(alarms([(4, 0)] * 250 + [(4, 3)] * 250 + [(4, 0)] * 250)) == 2


def test_counts_every_draft_of_a_long_block() -> None:
    """Fifteen always wrong drafts a round reach a thousand in 67 rounds."""
    assert alarms([(15, 0)] * 66) == []
    (warning,) = alarms([(15, 0)] * 67)
    assert "0 of 1005 drafts" in warning


@pytest.mark.parametrize("rounds", [[(15, 1), (15, 0)] * 5000, [(15, 1)] * 1000, [(4, 1), (4, 0), (4, 0)] * 1000])
def test_a_good_start_of_a_block_is_not_a_fault(rounds: list[tuple[int, int]]) -> None:
    """15 drafts of which the first is right half of the time: 3% of all drafts, but nothing is wrong."""
    assert alarms(rounds) == []


def test_tells_a_rate_as_low_as_it_judged() -> None:
    (warning,) = alarms(([(4, 1)] + [(4, 0)] * 24) * 10)
    assert "10 of 1000 drafts were accepted (1.0%)" in warning


def test_a_drafter_that_was_given_up_is_told_once_with_what_was_seen() -> None:
    alarm = AcceptanceAlarm()
    for _ in range(MIN_ROUNDS_GIVEN_UP - 1):
        alarm.observe(drafted=4, accepted=0)
        assert alarm.given_up() is None
    alarm.observe(drafted=4, accepted=0)
    warning = alarm.given_up()
    assert warning is not None
    assert f"0 of {4 * MIN_ROUNDS_GIVEN_UP} drafts" in warning
    assert "drafting was stopped" in warning
    assert alarm.given_up() is None
    assert not any(alarm.observe(drafted=4, accepted=0) for _ in range(1000))


def test_a_drafter_that_was_good_may_be_given_up_silently() -> None:
    alarm = AcceptanceAlarm()
    for accepted in [2] * 30 + [0] * 100:
        alarm.observe(drafted=4, accepted=accepted)
    assert alarm.given_up() is None


def test_rounds_are_counted_over_the_retries_of_a_dear_drafter(caplog: pytest.LogCaptureFixture) -> None:
    """Drafts as dear as a step are stopped after the first six rounds, which tell nothing yet."""
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=9)
    sequence = Sequence(request_id="a", params=params, tokens=[1] * 10, prompt_len=9, arrival=0, num_computed=9, slot=0)
    controller, drafted = DraftLengthController({"mtp": 4}, adaptive=True), 0
    for step in range(6000):
        controller.begin_step([sequence])
        k = controller(sequence).number
        rows = [ScheduledRows(slot=0, start=9, num_known=1, num_drafts=k, samples=True)]
        controller.end_step(
            StepPlan(step=step, scheduled=rows), [SequenceOutcome(0, [1], num_drafts=k)], StepTimes(0.01 * k, 0.01)
        )
        drafted += k
        if step == 1000:
            assert caplog.text == ""
    assert caplog.text.count("Likely causes") == 1
    assert drafted < MIN_DRAFTS


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_live_engine_warns_about_a_drafter_that_never_guesses(
    adaptive: bool, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_checkpoint("31B")
    config = engine_config(
        target, drafter_path=str(tiny_assistant(target)), num_draft_tokens=7, adapt_draft_tokens=adaptive
    )
    submits = [request(f"r{i}", [5 + i, 6, 7], 60) for i in range(4)]
    with caplog.at_level(logging.WARNING):
        run = run_engine(SoloCommunicator(), config, submits)
    assert run is not None
    assert caplog.text.count("Likely causes") == 1
    found = re.search(r"(\d+) of (\d+) drafts were accepted \(.*\) in (\d+) rounds", caplog.text)
    assert found is not None
    accepted, drafted, rounds = map(int, found.groups())
    speculation = run.speculation
    assert rounds <= speculation.rounds
    assert accepted <= speculation.accepted
    if adaptive:
        assert drafted <= speculation.drafted < MIN_DRAFTS
    else:
        assert MIN_DRAFTS <= drafted <= speculation.drafted
