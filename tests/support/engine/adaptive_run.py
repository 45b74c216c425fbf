"""A live engine that adapts its draft length to made-up step times, the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gemray_workers.drafters.controller import DraftLengthController
from gemray_workers.execution.step_clock import StepTimes
from gemray_workers.messages import SpeculationCounters, Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.scheduling.outcome import SequenceOutcome
from gemray_workers.scheduling.plan import StepPlan
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant
from support.engine.engine_runner import engine_config, run_engine

VERIFY_S = 10e-3
DRAFT_S = 1e-3


def counters_with_a_wrong_drafter(patch: pytest.MonkeyPatch, submits: list[Submit]) -> SpeculationCounters:
    """Counters of the first request. The random drafter is nearly always wrong; asserts that ids do not change."""
    learn = DraftLengthController.end_step

    def end_step(
        self: DraftLengthController, plan: StepPlan, outcomes: Sequence[SequenceOutcome], _: StepTimes
    ) -> None:
        drafts = sum(rows.num_drafts for rows in plan.scheduled)
        learn(self, plan, outcomes, StepTimes(drafts * DRAFT_S, VERIFY_S))

    patch.setattr(DraftLengthController, "end_step", end_step)
    target = tiny_checkpoint("31B")
    plain = run_engine(SoloCommunicator(), engine_config(target), submits)
    config = engine_config(
        target, drafter_path=str(tiny_assistant(target)), num_draft_tokens=4, adapt_draft_tokens=True
    )
    adapted = run_engine(SoloCommunicator(), config, submits)
    assert plain is not None
    assert adapted is not None
    assert adapted.ids == plain.ids
    counters = adapted.results[submits[0].request_id].last.speculation
    assert counters is not None
    return counters
