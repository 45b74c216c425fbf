"""Rank 0's bookkeeping around `choose_draft_length` and `choose_drafts`: what a step drafts, and what it taught."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from gemray_workers.drafters.acceptance_alarm import AcceptanceAlarm
from gemray_workers.drafters.draft_length import PATIENCE, TRIES, Estimates, Load, choose_draft_length
from gemray_workers.drafters.drafter_choice import choose_drafter, choose_drafts
from gemray_workers.execution.step_clock import StepTimes
from gemray_workers.scheduling.outcome import SequenceOutcome
from gemray_workers.scheduling.plan import ScheduledRows, StepPlan
from gemray_workers.scheduling.request import Sequence
from gemray_workers.scheduling.shares import Drafts

logger = logging.getLogger(__name__)

_AUTO = "auto"


@dataclass(frozen=True)
class _Decision:
    """What was decided on for some sequences of one step."""

    load: Load
    drafts: Drafts
    slots: frozenset[int] = frozenset()
    """Slots whose number of drafts the controller chooses."""

    def is_for(self, rows: ScheduledRows) -> bool:
        """Whether the rows are of a sequence that the decision was for (a slot may since have a new one)."""
        return rows.slot in self.slots and rows.start > 0


class DraftLengthController:
    """Tells the scheduler how many drafts a sequence gets in the next step, and whose. Steps end in the order in which
    they begin, and one may begin before the one before has ended.

    Requests that name a method are decided for apart from those that leave it to the server: for these the drafter is
    chosen too, and may be another one in each step.
    """

    def __init__(self, num_draft_tokens: Mapping[str, int], *, adaptive: bool) -> None:
        """That many drafts always, or as many as pay when `adaptive`; with several drafters the one that pays most.

        Args:
            num_draft_tokens: of each drafter, by its method; empty when nothing is drafted.
            adaptive: whether measurements decide.
        """
        self._methods = tuple(num_draft_tokens)
        self._most = tuple(num_draft_tokens.values()) or (0,)
        self._adaptive = adaptive
        self._estimates = [Estimates() for _ in self._most]
        self._alarms = [AcceptanceAlarm() for _ in self._most]
        named = [(_AUTO, 0)] if len(self._most) == 1 else [(_AUTO, 0), *((m, i) for i, m in enumerate(self._methods))]
        self._newest = {
            group: _Decision(Load.of(0, 0), Drafts(self._most[drafter], drafter)) for group, drafter in named
        }
        """By what requests ask for."""
        self._begun: deque[dict[str, _Decision]] = deque()  # of steps that have not ended, oldest first
        self._steps_without = [0] * len(self._most)  # since a drafter's drafts were last decided on
        self._num_other_rows = dict.fromkeys(self._newest, 0)
        """Rows of others in the step that ended last: the scheduler has not yet decided the next one's."""

    def begin_step(self, running: SequenceOf[Sequence]) -> None:
        """Decide for the sequences that decode now and state no number of their own."""
        decoding: dict[str | None, list[Sequence]] = {}
        for sequence in running:
            if sequence.num_pending == 1 and sequence.least_computed and sequence.params.num_draft_tokens is None:
                decoding.setdefault(self._group_of(sequence), []).append(sequence)
        self._newest = {group: self._decide(group, decoding.get(group, [])) for group in self._newest}
        self._begun.append(self._newest)

    def _group_of(self, sequence: Sequence) -> str | None:
        """None for a sequence that drafts nothing."""
        method = sequence.params.draft_method
        if method != _AUTO and method not in self._methods:
            return None
        return method if method in self._newest else _AUTO

    def _decide(self, group: str, decoding: SequenceOf[Sequence]) -> _Decision:
        newest = self._newest[group]
        has_choice = group == _AUTO and len(self._most) > 1
        if not decoding or not (self._adaptive or has_choice):
            return replace(newest, slots=frozenset())
        mean_context = sum(sequence.least_computed for sequence in decoding) / len(decoding)
        load = Load.of(len(decoding), mean_context, self._num_other_rows[group])
        if has_choice:
            drafts = (choose_drafts if self._adaptive else choose_drafter)(self._estimates, load, self._most)
        else:
            drafter = newest.drafts.drafter
            drafts = Drafts(choose_draft_length(self._estimates[drafter], load, self._most[drafter]), drafter)
        return _Decision(load, drafts, frozenset(sequence.running_slot for sequence in decoding))

    def __call__(self, sequence: Sequence) -> Drafts:
        """Drafts for one sequence: a request that states a number gets it, whatever pays."""
        group = self._group_of(sequence)
        if group is None:
            return Drafts(0)
        drafts = self._newest[group].drafts
        if sequence.params.num_draft_tokens is None:
            return drafts
        return Drafts(self._most[drafts.drafter], drafts.drafter)

    def end_step(self, plan: StepPlan, outcomes: SequenceOf[SequenceOutcome], times: StepTimes) -> None:
        """Learn from the oldest step that has not ended. The alarms count every round, the choice only those of the
        slots that it was made for.
        """
        decisions = self._begun.popleft()
        for rows, outcome in zip(plan.scheduled, outcomes, strict=True):
            if outcome.num_drafts and outcome.token_ids:
                self._warn(
                    rows.drafter,
                    self._alarms[rows.drafter].observe(drafted=outcome.num_drafts, accepted=outcome.num_accepted),
                )
                if any(decision.is_for(rows) for decision in decisions.values()):
                    estimates = self._estimates[rows.drafter]
                    self._estimates[rows.drafter] = estimates.with_acceptance(outcome.num_drafts, outcome.num_accepted)
        decided = set()
        for group, decision in decisions.items():
            chosen = [rows for rows in plan.scheduled if decision.is_for(rows)]
            if chosen:
                others = (rows for rows in plan.scheduled if not decision.is_for(rows))
                self._num_other_rows[group] = sum(rows.num_known + rows.num_drafts for rows in others)
                self._learn_time(group, decision, chosen, times)
                decided.add(decision.drafts)
        if decided:
            drafting = {drafts.drafter for drafts in decided if drafts.number}
            self._estimates = [e if i in drafting else e.with_rest() for i, e in enumerate(self._estimates)]
            self._notice_giving_up(drafting)

    def _learn_time(self, group: str, decision: _Decision, chosen: SequenceOf[ScheduledRows], times: StepTimes) -> None:
        """Record the time under what the step really had: limits may have cut drafts, and the rows of the others are
        known only now. The time of a step that compiled a program is not used.
        """
        had = decision.load.beside(self._num_other_rows[group])
        length = round(sum(rows.num_drafts for rows in chosen) / len(chosen))
        drafter = decision.drafts.drafter
        self._estimates[drafter] = self._estimates[drafter].with_decision(decision.load, decision.drafts.number)
        if times.compiled:
            return
        for of in range(len(self._estimates)) if length == 0 else (drafter,):  # plain steps belong to all
            self._estimates[of] = self._estimates[of].with_step(had, length, times.draft + times.verify)

    def _notice_giving_up(self, drafting: set[int]) -> None:
        """Tell the alarms of drafters that more steps went without than measuring plain decoding takes.

        Args:
            drafting: those whose drafts were decided on.
        """
        for drafter, alarm in enumerate(self._alarms):
            self._steps_without[drafter] = 0 if drafter in drafting else self._steps_without[drafter] + 1
            if self._steps_without[drafter] > TRIES * PATIENCE * len(self._alarms):
                self._warn(drafter, alarm.given_up())

    def _warn(self, drafter: int, warning: str | None) -> None:
        if warning is not None:
            whose = f"{self._methods[drafter]}: " if len(self._methods) > 1 else ""
            logger.warning("%s%s", whose, warning)
