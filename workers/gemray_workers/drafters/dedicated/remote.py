"""The target's end of a dedicated drafter: the same protocol as a drafter in the ranks, over the wire.

Shape legend: A sequences of a cycle and the null slot.
"""

from __future__ import annotations

from torch import Tensor

from gemray_workers.drafters.dedicated.messages import DraftBatch, VerifiedBatch
from gemray_workers.execution.cycle_rows import CycleRows, PackedRows
from gemray_workers.execution.slots import SlotTable
from gemray_workers.model.batch import ForwardOutput
from gemray_workers.parallel.communicator import PointToPoint


class RemoteDrafter:
    """Stands for the drafter on every target rank. The drafter follows the same step plans by itself."""

    weight_bytes = 0
    """They are on the drafter's rank."""

    def __init__(self, link: PointToPoint, *, rank: int, drafter_rank: int) -> None:
        """`rank` is this target rank's number; rank 0 speaks for the target."""
        self._link = link
        self._rank = rank
        self._drafter_rank = drafter_rank

    def propose(self, rows: CycleRows, slots: SlotTable) -> None:
        """Receive the drafts that the plan asks for."""
        DraftBatch.receive(rows, self._link, self._drafter_rank).write(rows, slots)

    def commit(
        self, rows: CycleRows, packed: PackedRows, slots: SlotTable, output: ForwardOutput, accepted_A: Tensor
    ) -> None:
        """Send features, accepted counts and newest tokens; they are the same on every target rank."""
        if self._rank != 0:
            return
        if output.captured_TFH is None:
            raise RuntimeError("the target's forward pass captured no features")
        VerifiedBatch.of(rows, slots, output.captured_TFH, accepted_A).send(self._link, self._drafter_rank)

    def reset(self, slot: int) -> None:
        """The drafter's worker sees the plan's releases itself."""
