"""The engine: one step gives each scheduled sequence its next tokens.

Every rank runs the same step on the same plan. What the ranks exchange is visible here and in the model: the plan
(rank 0 to all, in `Planner.schedule`), the model's all-reduces, and the candidates of the token choice.

With lag 0 a step is committed before the next is planned. With lag 1 the host plans and enqueues a step while the one
before still runs, and then commits that one: the device never waits for the host. Tokens are the same either way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from gemray_workers.drafters.protocol import Drafter
from gemray_workers.engine.cycle import CycleOutput, CycleRunner
from gemray_workers.engine.grammar_masks import GrammarMasks
from gemray_workers.engine.outcomes import Flight, OutcomeReader
from gemray_workers.engine.planner import Planner, apply_plan
from gemray_workers.execution.cycle_rows import CyclePlan
from gemray_workers.execution.host_copy import HostResult
from gemray_workers.execution.slots import SlotTable
from gemray_workers.execution.step_clock import StepTimes, clock_of
from gemray_workers.kv.pool import KVPools
from gemray_workers.messages import SequenceDelta
from gemray_workers.scheduling.plan import StepPlan


class Engine:
    """One rank's part of the gang's engine."""

    def __init__(
        self,
        *,
        cycle: CycleRunner[CycleOutput],
        slots: SlotTable,
        drafter: Drafter,
        reader: OutcomeReader,
        planner: Planner,
        grammar_masks: GrammarMasks,
        lag: int = 0,
        poisoned: Sequence[KVPools] = (),
    ) -> None:
        """An engine with no requests.

        Args:
            cycle: the device's part of a step.
            slots: the sequences.
            drafter: told when a slot gets another sequence.
            reader: what the host learns of a cycle.
            planner: where plans come from and results go.
            grammar_masks: of rows that follow a grammar.
            lag: steps that may be in flight while the next one is planned, 0 or 1.
            poisoned: pools whose freed pages are filled with NaN (debugging).
        """
        self._cycle = cycle
        self._slots = slots
        self._drafter = drafter
        self._reader = reader
        self._planner = planner
        self._grammar_masks = grammar_masks
        self._lag = lag
        self._clock = clock_of(slots.device)
        self._in_flight: deque[Flight] = deque()
        self._poisoned = poisoned

    @torch.inference_mode()
    def step(self) -> bool:
        """Run one step; False when the plan says that the gang ends."""
        plan = self.schedule()
        may_stay = 0
        if plan.scheduled:
            flight = self.launch(plan)
            self._in_flight.append(flight)
            # Log-probabilities are read before the next cycle writes its own, and a grammar's next masks follow from
            # the tokens of this one.
            may_stay = 0 if flight.wants_logprobs or flight.cycle.features.grammar else self._lag
        while len(self._in_flight) > may_stay:
            self.publish(self.commit(self._in_flight.popleft()))
        if not plan.scheduled:
            self._clock.rest()
            self.publish(self._planner.commit(plan, [], StepTimes()))
        return not plan.stop

    def run(self) -> None:
        """Step until a plan says stop."""
        while self.step():
            pass

    def schedule(self) -> StepPlan:
        """Take the next plan and bring the slot table to where it says."""
        plan = self._planner.schedule()
        apply_plan(plan, self._drafter, self._slots, self._poisoned)
        return plan

    def launch(self, plan: StepPlan) -> Flight:
        """Enqueue the plan's cycle: draft, forward, verify and commit on the device."""
        cycle = self._cycle.fit(CyclePlan.of(plan.scheduled, self._slots.sampling))
        table_S6 = cycle.table(self._slots.null_slot).to(self._slots.device, non_blocking=True)
        marks = self._clock.start()
        self._cycle.draft(cycle, table_S6)
        marks.drafted()
        output = self._cycle.decide(cycle, table_S6, self._grammar_masks.begin(cycle))
        marks.verified()
        wants_logprobs = self._reader.wants_logprobs(plan)
        found = HostResult(output.found_CK if self._planner.learns or wants_logprobs else None)
        return Flight(plan, cycle, output, marks, found, wants_logprobs)

    def commit(self, flight: Flight) -> list[SequenceDelta]:
        """Learn what a cycle gave: lengths and pages on rank 0, and what each request gets."""
        if not self._planner.learns and not flight.wants_logprobs:
            return []
        outcomes = self._reader.outcomes(flight)
        return self._planner.commit(flight.plan, outcomes, flight.marks.times())

    def publish(self, deltas: list[SequenceDelta]) -> None:
        """Rank 0 sends every request's new tokens."""
        self._planner.publish(deltas)
