"""The engine: one step computes the scheduled rows of all sequences and gives each its next tokens.

Every rank runs the same step on the same plan. What the ranks exchange is visible here and in the model: the
plan (rank 0 to all, in `Planner.schedule`), the model's all-reduces, and the candidates of the token choice.

Shape legend: T rows, R logits rows, H hidden size, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemray_workers.drafters.protocol import Drafter
from gemray_workers.engine.planner import Planner
from gemray_workers.engine.rows import forward_batch, prompt_logprob_rows, sampled_rows
from gemray_workers.engine.slots import SlotTable
from gemray_workers.engine.step_clock import StepTimes, step_clock
from gemray_workers.engine.verification import Verifier
from gemray_workers.kv.cache import KVCaches
from gemray_workers.kv.pool import KVPools
from gemray_workers.messages import SequenceDelta
from gemray_workers.model.batch import ForwardBatch, ForwardOutput
from gemray_workers.model.target import TargetModel
from gemray_workers.scheduling.plan import SequenceOutcome, StepPlan


class Engine:
    """One rank's part of the gang's engine."""

    def __init__(
        self,
        *,
        model: TargetModel,
        caches: KVCaches,
        pools: Sequence[KVPools],
        slots: SlotTable,
        drafter: Drafter,
        captured_layers: tuple[int, ...],
        verifier: Verifier,
        planner: Planner,
        poison_freed_pages: bool = False,
    ) -> None:
        self._model = model
        self._caches = caches
        self._pools = pools
        self._slots = slots
        self._drafter = drafter
        self._captured_layers = captured_layers
        self._verifier = verifier
        self._planner = planner
        self._clock = step_clock(slots.device)
        self._poison_freed_pages = poison_freed_pages

    @torch.inference_mode()
    def step(self) -> bool:
        """Run one step; False when the plan says that the gang ends."""
        plan = self.schedule()
        if plan.rows:
            self.draft(plan)
            batch, output = self.forward(plan)
            outcomes, times = self.verify(plan, output)
            deltas = self.commit(plan, batch, output, outcomes, times)
        else:
            deltas = self._planner.commit(plan, [], StepTimes())
        self.publish(deltas)
        return not plan.stop

    def run(self) -> None:
        """Step until a plan says stop."""
        while self.step():
            pass

    def schedule(self) -> StepPlan:
        """Take the next plan and bring the slot table to where it says."""
        plan = self._planner.schedule()
        for slot in (*plan.released, *(admission.slot for admission in plan.admitted)):
            self._drafter.reset(slot)
        self._slots.apply(plan)
        if self._poison_freed_pages:
            for pools in self._pools:
                pools.poison(plan.freed_pages)
        return plan

    def draft(self, plan: StepPlan) -> None:
        """Put proposed tokens behind the newest one of each sequence that asks for drafts."""
        self._clock.start()
        self._drafter.propose(plan.rows, self._slots)
        self._clock.drafted()

    def forward(self, plan: StepPlan) -> tuple[ForwardBatch, ForwardOutput]:
        """Run the target once over prompt chunks and verify rows alike."""
        batch = forward_batch(plan.rows, self._slots)
        output = self._model.forward(batch, self._caches, capture=self._captured_layers)
        return batch, output

    def verify(self, plan: StepPlan, output: ForwardOutput) -> tuple[list[SequenceOutcome], StepTimes]:
        """Choose each row's token and keep the drafts that equal it; also what the step has taken so far."""
        prompt_lens = [self._slots[r.slot].prompt_len for r in plan.rows]
        outcomes = self._verifier.verify(
            plan.rows,
            self._slots,
            output.hidden_TH,
            sampled=sampled_rows(plan.rows),
            prompt=prompt_logprob_rows(plan.rows, prompt_lens),
        )
        return outcomes, self._clock.verified()

    def commit(
        self,
        plan: StepPlan,
        batch: ForwardBatch,
        output: ForwardOutput,
        outcomes: Sequence[SequenceOutcome],
        times: StepTimes,
    ) -> list[SequenceDelta]:
        """Make the outcome the state: tokens on every rank, the drafter's view, lengths and pages on rank 0."""
        for outcome in outcomes:
            self._slots.append(outcome.slot, outcome.token_ids)
        self._drafter.commit(plan.rows, self._slots, batch, output, [o.num_accepted for o in outcomes])
        self._slots.advance(plan.rows)
        return self._planner.commit(plan, outcomes, times)

    def publish(self, deltas: list[SequenceDelta]) -> None:
        """Rank 0 sends every request's new tokens."""
        self._planner.publish(deltas)
