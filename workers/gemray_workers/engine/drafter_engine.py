"""The drafter's end: a loop that follows rank 0's step plans, drafts, and learns what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gemray_workers.drafters.dedicated.messages import DraftBatch, VerifiedBatch
from gemray_workers.drafters.protocol import Drafter
from gemray_workers.engine.planner import FollowPlanner, apply_plan
from gemray_workers.execution.cycle_rows import CyclePlan, CycleRows, advance
from gemray_workers.execution.slots import SlotTable
from gemray_workers.kv.pool import KVPools
from gemray_workers.model.batch import ForwardOutput
from gemray_workers.parallel.communicator import PointToPoint
from gemray_workers.scheduling.plan import StepPlan


class DrafterEngine:
    """Step by step beside the target's `Engine`: schedule, draft, send; receive, commit."""

    def __init__(
        self,
        *,
        drafter: Drafter,
        slots: SlotTable,
        planner: FollowPlanner,
        link: PointToPoint,
        num_target_ranks: int,
        feature_shape: tuple[int, int],
        dtype: torch.dtype,
        poisoned: Sequence[KVPools] = (),
    ) -> None:
        self._drafter = drafter
        self._slots = slots
        self._planner = planner
        self._link = link
        self._num_target_ranks = num_target_ranks
        self._feature_shape = feature_shape
        self._dtype = dtype
        self._poisoned = poisoned

    @torch.inference_mode()
    def step(self) -> bool:
        """One step; False when the plan says that the gang ends."""
        plan = self.schedule()
        if plan.scheduled:
            self.run_cycle(CyclePlan.of(plan.scheduled, self._slots.sampling))
        return not plan.stop

    def run_cycle(self, plan: CyclePlan) -> None:
        """Draft, send; receive, commit."""
        rows = self.rows(plan)
        self.draft(rows)
        self.commit(rows, self.receive(rows))

    def run(self) -> None:
        """Step until a plan says stop."""
        while self.step():
            pass

    def schedule(self) -> StepPlan:
        """Take the next plan and bring slots and pages to where it says."""
        plan = self._planner.schedule()
        apply_plan(plan, self._drafter, self._slots, self._poisoned)
        return plan

    def rows(self, cycle: CyclePlan) -> CycleRows:
        """The plan's rows, cut as the target cuts them."""
        cycle = replace(cycle, features=self._slots.sampling.in_few_programs(cycle.features))
        table_S6 = cycle.table(self._slots.null_slot).to(self._slots.device, non_blocking=True)
        return CycleRows.of(cycle, table_S6, self._slots)

    def draft(self, rows: CycleRows) -> None:
        """Propose what the plan asks for and send it to every target rank."""
        if not rows.shape.num_drafting:
            return
        self._drafter.propose(rows, self._slots)
        drafts = DraftBatch.read(rows, self._slots)
        for rank in range(self._num_target_ranks):
            drafts.send(self._link, to=rank)

    def receive(self, rows: CycleRows) -> VerifiedBatch:
        """Wait for what the target has decided."""
        return VerifiedBatch.receive(rows, self._feature_shape, self._link, self._dtype)

    def commit(self, rows: CycleRows, verified: VerifiedBatch) -> None:
        """Note the newest tokens and take the context of committed rows in."""
        verified.write(rows, self._slots)
        packed = rows.all_rows(self._slots)
        output = ForwardOutput(hidden_UH=verified.features_TFH[:, -1], captured_TFH=verified.features_TFH)
        self._drafter.commit(rows, packed, self._slots, output, verified.accepted_A)
        advance(rows, verified.accepted_A, self._slots)
