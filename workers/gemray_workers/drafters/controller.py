"""Rank 0's bookkeeping around `choose_draft_length`: what a step is to draft, and what it taught."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf

from gemray_workers.drafters.acceptance_alarm import AcceptanceAlarm
from gemray_workers.drafters.draft_length import PATIENCE, TRIES, Estimates, Load, choose_draft_length
from gemray_workers.execution.step_clock import StepTimes
from gemray_workers.scheduling.plan import ScheduledRows, SequenceOutcome, StepPlan
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
        self._steps_without = 0  # since drafts were last decided on
        self._chosen_for: frozenset[int] = frozenset()  # slots whose number of drafts is ours to choose
        self._num_other_rows = 0  # of the last step: the scheduler has not yet decided the next one's

    def begin_step(self, running: SequenceOf[Sequence]) -> None:
        """Decide for the sequences that decode now and state no number of their own."""
        if not self._adaptive:
            return
        decoding = [
            sequence
            for sequence in running
            if sequence.num_pending == 1 and sequence.num_computed and sequence.params.num_draft_tokens is None
        ]
        self._chosen_for = frozenset(sequence.running_slot for sequence in decoding)
        if not decoding:
            return
        mean_context = sum(sequence.num_computed for sequence in decoding) / len(decoding)
        self._load = Load.of(len(decoding), mean_context, self._num_other_rows)
        self._length = choose_draft_length(self._estimates, self._load, self._most)

    def __call__(self, sequence: Sequence) -> int:
        """Drafts for one sequence: a request that states a number gets it, whatever pays."""
        return self._most if sequence.params.num_draft_tokens is not None else self._length

    def end_step(self, plan: StepPlan, outcomes: SequenceOf[SequenceOutcome], times: StepTimes) -> None:
        """Learn from the step: the alarm from every round, the choice from those that it was made for."""
        for rows, outcome in zip(plan.rows, outcomes, strict=True):
            if rows.num_drafts and outcome.token_ids:
                _warn(self._alarm.observe(drafted=rows.num_drafts, accepted=outcome.num_accepted))
                if self._is_chosen(rows):
                    self._estimates = self._estimates.with_acceptance(rows.num_drafts, outcome.num_accepted)
        chosen = [rows for rows in plan.rows if self._is_chosen(rows)]
        if chosen:
            others = (rows for rows in plan.rows if not self._is_chosen(rows))
            self._num_other_rows = sum(rows.num_known + rows.num_drafts for rows in others)
            self._learn_time(chosen, times.draft + times.verify)
            self._notice_giving_up()

    def _learn_time(self, chosen: SequenceOf[ScheduledRows], seconds: float) -> None:
        """The time goes to what the step had: limits may have cut drafts, and others' rows are known only now."""
        had = self._load.beside(self._num_other_rows)
        length = round(sum(rows.num_drafts for rows in chosen) / len(chosen))
        decided = self._estimates.with_decision(self._load, self._length)
        self._estimates = decided.with_step(had, length, seconds)

    def _notice_giving_up(self) -> None:
        """More steps without drafts than it takes to measure plain decoding are a verdict."""
        self._steps_without = 0 if self._length else self._steps_without + 1
        if self._steps_without > TRIES * PATIENCE:
            _warn(self._alarm.given_up())

    def _is_chosen(self, rows: ScheduledRows) -> bool:
        """Whether the rows are of a sequence that the decision was for (a slot may since have a new one)."""
        return rows.slot in self._chosen_for and rows.start > 0


def _warn(warning: str | None) -> None:
    if warning is not None:
        logger.warning("%s", warning)
