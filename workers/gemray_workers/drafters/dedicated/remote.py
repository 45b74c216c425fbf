"""The target's end of a dedicated drafter: the same protocol as a drafter in the ranks, over the wire."""

from __future__ import annotations

from collections.abc import Sequence

from gemray_workers.drafters.dedicated.messages import DraftBatch, VerifiedBatch
from gemray_workers.engine.host_copy import to_device
from gemray_workers.engine.slots import SlotTable
from gemray_workers.model.batch import ForwardBatch, ForwardOutput
from gemray_workers.parallel.communicator import PointToPoint
from gemray_workers.scheduling.plan import ScheduledRows


class RemoteDrafter:
    """Stands for the drafter on every target rank. The drafter follows the same step plans by itself."""

    weight_bytes = 0
    """They are on the drafter's rank."""

    def __init__(self, link: PointToPoint, *, rank: int, drafter_rank: int) -> None:
        """`rank` is this target rank's number; rank 0 speaks for the target."""
        self._link = link
        self._rank = rank
        self._drafter_rank = drafter_rank

    def propose(self, rows: Sequence[ScheduledRows], slots: SlotTable) -> None:
        """Receive the drafts that the plan asks for."""
        if any(r.num_drafts for r in rows):
            drafts = DraftBatch.receive(rows, self._link, self._drafter_rank, slots.device)
            drafts.write(rows, slots)

    def commit(
        self,
        rows: Sequence[ScheduledRows],
        slots: SlotTable,
        batch: ForwardBatch,
        output: ForwardOutput,
        num_accepted: Sequence[int],
    ) -> None:
        """Send features, accepted counts and newest tokens; they are the same on every target rank."""
        if self._rank != 0:
            return
        if output.captured_TFH is None:
            raise RuntimeError("the target's forward pass captured no features")
        newest = [(slots[r.slot].token_ids[-1], n) for r, n in zip(rows, num_accepted, strict=True)]
        newest_S, num_accepted_S = to_device(newest, slots.device).unbind(1)
        VerifiedBatch(output.captured_TFH, num_accepted_S, newest_S).send(self._link, self._drafter_rank)

    def reset(self, slot: int) -> None:
        """The drafter's worker sees the plan's releases itself."""
