"""Rank 0's bookkeeping around `choose_draft_length`: what a step is to draft, and what it taught."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf

from gemray_workers.drafters.acceptance_alarm import AcceptanceAlarm
from gemray_workers.drafters.draft_length import Estimates, Load, choose_draft_length
from gemray_workers.engine.step_clock import StepTimes
from gemray_workers.scheduling.plan import SequenceOutcome, StepPlan
from gemray_workers.scheduling.request import Sequence

logger = logging.getLogger(__name__)


class DraftLengthController:
    """Tells the scheduler how many drafts a sequence gets in the next step."""

    def __init__(self, most: int, *, adaptive: bool) -> None:
        """`most` drafts always, or as many as pay when `adaptive`."""
        self._most = most
        self._adaptive = adaptive
        self._estimates = Estimates()
        self._alarm = AcceptanceAlarm()
        self._load = Load.of(0, 0)
        self._length = most

    def begin_step(self, running: SequenceOf[Sequence]) -> None:
        """Decide for the batch that runs now."""
        if not self._adaptive or not running:
            return
        self._load = Load.of(len(running), sum(sequence.num_computed for sequence in running) / len(running))
        self._length = choose_draft_length(self._estimates, self._load, self._most)

    def __call__(self, sequence: Sequence) -> int:
        """Drafts for one sequence: a request that states a number gets it, whatever pays."""
        return self._most if sequence.params.num_draft_tokens is not None else self._length

    def end_step(self, plan: StepPlan, outcomes: SequenceOf[SequenceOutcome], times: StepTimes) -> None:
        """Learn from the step: its time if every sequence decoded alike, acceptance in any case."""
        for rows, outcome in zip(plan.rows, outcomes, strict=True):
            if rows.num_drafts and outcome.token_ids:
                self._estimates = self._estimates.with_acceptance(rows.num_drafts, outcome.num_accepted)
                warning = self._alarm.observe(drafted=rows.num_drafts, accepted=outcome.num_accepted)
                if warning is not None:
                    logger.warning("%s", warning)
        if plan.rows and all(r.num_known == 1 and r.num_drafts == self._length for r in plan.rows):
            self._estimates = self._estimates.with_step(self._load, self._length, times.draft + times.verify)
