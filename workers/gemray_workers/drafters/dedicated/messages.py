"""What crosses between the target's ranks and a drafter's worker: typed batches of tensors by send and receive.

Both ends hold the step plan, so both know every shape: no header travels.

Shape legend: T rows of the cycle, A sequences and the null slot, D of them draft, K most drafts of one, F captured
layers, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_workers.execution.cycle_rows import CycleRows
from gemray_workers.execution.slots import SlotTable
from gemray_workers.parallel.communicator import PointToPoint


@dataclass(frozen=True)
class DraftBatch:
    """Drafter to every target rank: what to verify next."""

    ids_DK: Tensor
    """int64; behind a sequence's own drafts, any ids."""

    @classmethod
    def read(cls, rows: CycleRows, slots: SlotTable) -> DraftBatch:
        """Read the drafts from a slot table."""
        return cls(slots.token_ids_NL[_places(rows, slots)])

    @classmethod
    def receive(cls, rows: CycleRows, link: PointToPoint, source: int) -> DraftBatch:
        """Receive the drafts that a plan asks for."""
        shape = (rows.shape.num_drafting, rows.shape.max_drafts)
        return cls(link.receive(torch.empty(shape, dtype=torch.int64, device=rows.slot_A.device), source))

    def send(self, link: PointToPoint, to: int) -> None:
        """Send the drafts to one target rank."""
        link.send(self.ids_DK, to)

    def write(self, rows: CycleRows, slots: SlotTable) -> None:
        """Put the drafts behind the newest token of their sequences."""
        slots.token_ids_NL[_places(rows, slots)] = self.ids_DK


@dataclass(frozen=True)
class VerifiedBatch:
    """Target's first rank to drafter: what the step has decided."""

    features_TFH: Tensor
    """Outputs of the captured layers, rejected rows included."""
    accepted_A: Tensor
    """int64: drafts that now stand for good."""
    newest_A: Tensor
    """int64: the token behind each sequence's committed rows."""

    @classmethod
    def of(cls, rows: CycleRows, slots: SlotTable, features_TFH: Tensor, accepted_A: Tensor) -> VerifiedBatch:
        """Read the newest tokens from the target's slot table, once what is emitted stands there."""
        newest_A = slots.token_ids_NL[rows.slot_A, rows.start_A + rows.known_A + accepted_A]
        return cls(features_TFH, accepted_A, newest_A)

    @classmethod
    def receive(
        cls, rows: CycleRows, feature_shape: tuple[int, int], link: PointToPoint, dtype: torch.dtype
    ) -> VerifiedBatch:
        """Receive what the target found for the rows; `feature_shape` is (F, H)."""
        device = rows.slot_A.device
        features_TFH = torch.empty((rows.shape.num_rows, *feature_shape), dtype=dtype, device=device)
        counts_2S = torch.empty((2, len(rows.slot_A)), dtype=torch.int64, device=device)
        link.receive(features_TFH, 0)
        link.receive(counts_2S, 0)
        return cls(features_TFH, *counts_2S.unbind(0))

    def send(self, link: PointToPoint, to: int) -> None:
        """Send it to the drafter's worker."""
        link.send(self.features_TFH, to)
        link.send(torch.stack([self.accepted_A, self.newest_A]), to)

    def write(self, rows: CycleRows, slots: SlotTable) -> None:
        """Note the newest tokens: accepted drafts already stand in the drafter's own table."""
        slots.token_ids_NL[rows.slot_A, rows.start_A + rows.known_A + self.accepted_A] = self.newest_A


def _places(rows: CycleRows, slots: SlotTable) -> tuple[Tensor, Tensor]:
    """Slot and column of every draft, [D, K] each."""
    slot_D, start_D = rows.drafting(slots)
    column_DK = start_D[:, None] + torch.arange(1, rows.shape.max_drafts + 1, device=slots.device)
    return slot_D[:, None].expand_as(column_DK), column_DK
