"""The drafter's end: a loop that follows rank 0's step plans, drafts, and learns what was accepted.

Shape legend: S sequences, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemray_workers.drafters.dedicated.messages import DraftBatch, VerifiedBatch
from gemray_workers.drafters.protocol import Drafter
from gemray_workers.engine.host_copy import to_device
from gemray_workers.engine.planner import FollowPlanner
from gemray_workers.engine.rows import forward_batch
from gemray_workers.engine.slots import SlotTable
from gemray_workers.kv.pool import KVPools
from gemray_workers.model.batch import ForwardOutput
from gemray_workers.parallel.communicator import PointToPoint
from gemray_workers.scheduling.plan import ScheduledRows, StepPlan


class DrafterEngine:
    """Step by step beside the target's `Engine`: schedule, draft, send; receive, commit."""

    def __init__(
        self,
        *,
        drafter: Drafter,
        slots: SlotTable,
        pools: KVPools,
        planner: FollowPlanner,
        link: PointToPoint,
        num_target_ranks: int,
        feature_shape: tuple[int, int],
        dtype: torch.dtype,
        poison_freed_pages: bool = False,
    ) -> None:
        self._drafter = drafter
        self._slots = slots
        self._pools = pools
        self._planner = planner
        self._link = link
        self._num_target_ranks = num_target_ranks
        self._feature_shape = feature_shape
        self._dtype = dtype
        self._poison_freed_pages = poison_freed_pages

    @torch.inference_mode()
    def step(self) -> bool:
        """One step; False when the plan says that the gang ends."""
        plan = self.schedule()
        if plan.rows:
            self.draft(plan)
            self.commit(plan, self.receive(plan))
        return not plan.stop

    def run(self) -> None:
        """Step until a plan says stop."""
        while self.step():
            pass

    def schedule(self) -> StepPlan:
        """Take the next plan and bring slots and pages to where it says."""
        plan = self._planner.schedule()
        for slot in (*plan.released, *(admission.slot for admission in plan.admitted)):
            self._drafter.reset(slot)
        self._slots.apply(plan)
        if self._poison_freed_pages:
            self._pools.poison(plan.freed_pages)
        return plan

    def draft(self, plan: StepPlan) -> None:
        """Propose what the plan asks for and send it to every target rank."""
        if not any(r.num_drafts for r in plan.rows):
            return
        self._drafter.propose(plan.rows, self._slots)
        drafts = DraftBatch.read(plan.rows, self._slots)
        for rank in range(self._num_target_ranks):
            drafts.send(self._link, to=rank)

    def receive(self, plan: StepPlan) -> VerifiedBatch:
        """Wait for what the target has decided."""
        return VerifiedBatch.receive(
            plan.rows, self._feature_shape, self._link, dtype=self._dtype, device=self._slots.device
        )

    def commit(self, plan: StepPlan, verified: VerifiedBatch) -> None:
        """Note the newest tokens and take the context of committed rows in."""
        num_accepted = verified.num_accepted_S.tolist()
        self._note_newest(plan.rows, num_accepted, verified.newest_S)
        batch = forward_batch(plan.rows, self._slots)
        output = ForwardOutput(hidden_TH=verified.features_TFH[:, -1], captured_TFH=verified.features_TFH)
        self._drafter.commit(plan.rows, self._slots, batch, output, num_accepted)
        slot_S = to_device([r.slot for r in plan.rows], self._slots.device)
        self._slots.accepted_N[slot_S] = verified.num_accepted_S
        self._slots.advance(plan.rows)

    def _note_newest(self, rows: Sequence[ScheduledRows], num_accepted: Sequence[int], newest_S: Tensor) -> None:
        """Accepted drafts already stand in the table; behind them goes the target's own token."""
        places = [
            (i, r.slot, r.start + r.num_known + n)
            for i, (r, n) in enumerate(zip(rows, num_accepted, strict=True))
            if r.samples
        ]
        if places:
            index, slot, column = to_device(places, newest_S.device).unbind(1)
            self._slots.token_ids_NL[slot, column] = newest_S[index]
