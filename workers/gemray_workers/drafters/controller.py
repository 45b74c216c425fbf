"""Rank 0's bookkeeping around `choose_draft_length`: what a step is to draft, and what it taught."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from gemray_workers.drafters.acceptance_alarm import AcceptanceAlarm
from gemray_workers.drafters.draft_length import PATIENCE, TRIES, Estimates, Load, choose_draft_length
from gemray_workers.execution.step_clock import StepTimes
from gemray_workers.scheduling.plan import ScheduledRows, SequenceOutcome, StepPlan
from gemray_workers.scheduling.request import Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _DecidedLength:
    """What was decided on for one step."""

    load: Load
    length: int
    slots: frozenset[int]
    """Slots whose number of drafts the controller chooses."""


class DraftLengthController:
    """Tells the scheduler how many drafts a sequence gets in the next step. Steps end in the order in which they
    begin, and one may begin before the one before has ended.
    """

    def __init__(self, num_draft_tokens: int, *, adaptive: bool) -> None:
        """`num_draft_tokens` drafts always, or as many as pay when `adaptive`."""
        self._num_draft_tokens = num_draft_tokens
        self._adaptive = adaptive
        self._estimates = Estimates()
        self._alarm = AcceptanceAlarm()
        self._newest = _DecidedLength(Load.of(0, 0), num_draft_tokens, frozenset())
        self._begun: deque[_DecidedLength] = deque()  # steps that have not ended, oldest first
        self._steps_without = 0  # since drafts were last decided on
        self._num_other_rows = 0  # of the step that ended last: the scheduler has not yet decided the next one's

    def begin_step(self, running: SequenceOf[Sequence]) -> None:
        """Decide for the sequences that decode now and state no number of their own."""
        self._newest = self._decide(running)
        self._begun.append(self._newest)

    def _decide(self, running: SequenceOf[Sequence]) -> _DecidedLength:
        decoding = [
            sequence
            for sequence in running
            if sequence.num_pending == 1 and sequence.least_computed and sequence.params.num_draft_tokens is None
        ]
        if not self._adaptive or not decoding:
            return _DecidedLength(self._newest.load, self._newest.length, frozenset())
        mean_context = sum(sequence.least_computed for sequence in decoding) / len(decoding)
        load = Load.of(len(decoding), mean_context, self._num_other_rows)
        length = choose_draft_length(self._estimates, load, self._num_draft_tokens)
        return _DecidedLength(load, length, frozenset(sequence.running_slot for sequence in decoding))

    def __call__(self, sequence: Sequence) -> int:
        """Drafts for one sequence: a request that states a number gets it, whatever pays."""
        return self._num_draft_tokens if sequence.params.num_draft_tokens is not None else self._newest.length

    def end_step(self, plan: StepPlan, outcomes: SequenceOf[SequenceOutcome], times: StepTimes) -> None:
        """Learn from the oldest step that has not ended. The alarm counts every round, the choice only those of the
        slots that it was made for.
        """
        decision = self._begun.popleft()
        for rows, outcome in zip(plan.scheduled, outcomes, strict=True):
            if outcome.num_drafts and outcome.token_ids:
                _warn(self._alarm.observe(drafted=outcome.num_drafts, accepted=outcome.num_accepted))
                if _is_chosen(rows, decision):
                    self._estimates = self._estimates.with_acceptance(outcome.num_drafts, outcome.num_accepted)
        chosen = [rows for rows in plan.scheduled if _is_chosen(rows, decision)]
        if chosen:
            others = (rows for rows in plan.scheduled if not _is_chosen(rows, decision))
            self._num_other_rows = sum(rows.num_known + rows.num_drafts for rows in others)
            self._learn_time(decision, chosen, times)
            self._notice_giving_up(decision)

    def _learn_time(self, decision: _DecidedLength, chosen: SequenceOf[ScheduledRows], times: StepTimes) -> None:
        """Record the time under what the step really had: limits may have cut drafts, and the rows of the others are
        known only now. The time of a step that compiled a program is not used.
        """
        had = decision.load.beside(self._num_other_rows)
        length = round(sum(rows.num_drafts for rows in chosen) / len(chosen))
        self._estimates = self._estimates.with_decision(decision.load, decision.length)
        if not times.compiled:
            self._estimates = self._estimates.with_step(had, length, times.draft + times.verify)

    def _notice_giving_up(self, decision: _DecidedLength) -> None:
        """Tell the alarm when more steps went without drafts than measuring plain decoding takes."""
        self._steps_without = 0 if decision.length else self._steps_without + 1
        if self._steps_without > TRIES * PATIENCE:
            _warn(self._alarm.given_up())


def _is_chosen(rows: ScheduledRows, decision: _DecidedLength) -> bool:
    """Whether the rows are of a sequence that the decision was for (a slot may since have a new one)."""
    return rows.slot in decision.slots and rows.start > 0


def _warn(warning: str | None) -> None:
    if warning is not None:
        logger.warning("%s", warning)
