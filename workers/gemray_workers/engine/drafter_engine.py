"""The drafter's end: a loop that follows rank 0's step plans, drafts, and learns what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gemray_workers.drafters.dedicated.messages import DraftBatch, VerifiedBatch
from gemray_workers.drafters.protocol import Drafter
from gemray_workers.engine.cycle import CycleRunner
from gemray_workers.engine.planner import FollowPlanner, apply_plan
from gemray_workers.execution.cycle_rows import CyclePlan, CycleRows, advance
from gemray_workers.execution.slots import SlotTable
from gemray_workers.kv.pool import KVPools
from gemray_workers.model.batch import ForwardOutput
from gemray_workers.parallel.communicator import PointToPoint
from gemray_workers.sampling.row_masks import MakeMasks


class DrafterCycle:
    """The drafter's half of a cycle, kernel by kernel: it has the verbs and shapes of the target's `Cycle`."""

    def __init__(
        self,
        *,
        drafter: Drafter,
        slots: SlotTable,
        link: PointToPoint,
        num_target_ranks: int,
        feature_shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """Beside `num_target_ranks` ranks of a target whose captured layers give `feature_shape` (F, H) a row."""
        self._drafter = drafter
        self._slots = slots
        self._link = link
        self._num_target_ranks = num_target_ranks
        self._feature_shape = feature_shape
        self._dtype = dtype

    def fit(self, plan: CyclePlan) -> CyclePlan:
        """As `Cycle.fit`: the target's ranks have the same features."""
        return replace(plan, features=self._slots.sampling.in_few_programs(plan.features))

    def draft(self, plan: CyclePlan, table_S6: Tensor) -> None:
        """Propose what the plan asks for and send it to every target rank."""
        if not plan.shape.num_drafting:
            return
        rows = CycleRows.of(plan, table_S6, self._slots)
        self._drafter.propose(rows, self._slots)
        drafts = DraftBatch.read(rows, self._slots)
        for rank in range(self._num_target_ranks):
            drafts.send(self._link, to=rank)

    def decide(self, plan: CyclePlan, table_S6: Tensor, masks: MakeMasks | None = None) -> None:
        """Wait for what the target has decided, and take the context of committed rows in; `masks` are the target's."""
        rows = CycleRows.of(plan, table_S6, self._slots)
        verified = VerifiedBatch.receive(rows, self._feature_shape, self._link, self._dtype)
        verified.write(rows, self._slots)
        packed = rows.all_rows(self._slots)
        output = ForwardOutput(hidden_UH=verified.features_TFH[:, -1], captured_TFH=verified.features_TFH)
        self._drafter.commit(rows, packed, self._slots, output, verified.accepted_A)
        advance(rows, verified.accepted_A, self._slots)


class DrafterEngine:
    """Step by step beside the target's `Engine`: schedule, draft, send; receive, commit."""

    def __init__(
        self,
        *,
        cycle: CycleRunner[None],
        drafter: Drafter,
        slots: SlotTable,
        planner: FollowPlanner,
        poisoned: Sequence[KVPools] = (),
    ) -> None:
        """An engine with no requests.

        Args:
            cycle: this rank's half of a step on the device: `DrafterCycle`, or its graphs.
            drafter: told when a slot gets another sequence.
            slots: the sequences.
            planner: where plans come from.
            poisoned: pools whose freed pages are filled with NaN (debugging).
        """
        self._cycle = cycle
        self._drafter = drafter
        self._slots = slots
        self._planner = planner
        self._poisoned = poisoned

    @torch.inference_mode()
    def step(self) -> bool:
        """One step; False when the plan says that the gang ends."""
        plan = self._planner.schedule()
        apply_plan(plan, self._drafter, self._slots, self._poisoned)
        if plan.scheduled:
            self.run_cycle(CyclePlan.of(plan.scheduled, self._slots.sampling))
        return not plan.stop

    def run_cycle(self, plan: CyclePlan) -> None:
        """Draft, send; receive, commit."""
        plan = self._cycle.fit(plan)
        table_S6 = plan.table(self._slots.null_slot).to(self._slots.device, non_blocking=True)
        self._cycle.draft(plan, table_S6)
        self._cycle.decide(plan, table_S6)

    def run(self) -> None:
        """Step until a plan says stop."""
        while self.step():
            pass
