"""What crosses between the target's ranks and a drafter's worker: typed batches of tensors by send and receive.

Both ends hold the step plan, so both know every shape: no header travels.

Shape legend: T rows of the step, S sequences, F captured layers, H hidden size, R drafts of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_workers.engine.host_copy import to_device
from gemray_workers.engine.slots import SlotTable
from gemray_workers.parallel.communicator import PointToPoint
from gemray_workers.scheduling.plan import ScheduledRows


@dataclass(frozen=True)
class DraftBatch:
    """Drafter to every target rank: what to verify next."""

    ids_R: Tensor
    """int64: the drafts of the first sequence that has any, then of the next."""

    @classmethod
    def read(cls, rows: Sequence[ScheduledRows], slots: SlotTable) -> DraftBatch:
        """The drafts that stand in a slot table."""
        slot_R, column_R = _places(rows, slots.device)
        return cls(slots.token_ids_NL[slot_R, column_R])

    @classmethod
    def receive(
        cls, rows: Sequence[ScheduledRows], link: PointToPoint, source: int, device: torch.device
    ) -> DraftBatch:
        """The drafts that a plan's `rows` ask for."""
        ids_R = torch.empty(sum(r.num_drafts for r in rows), dtype=torch.int64, device=device)
        return cls(link.receive(ids_R, source))

    def send(self, link: PointToPoint, to: int) -> None:
        """To one target rank."""
        link.send(self.ids_R, to)

    def write(self, rows: Sequence[ScheduledRows], slots: SlotTable) -> None:
        """Put the drafts behind the newest token of their sequences."""
        slot_R, column_R = _places(rows, slots.device)
        slots.token_ids_NL[slot_R, column_R] = self.ids_R


@dataclass(frozen=True)
class VerifiedBatch:
    """Target's first rank to drafter: what the step has decided."""

    features_TFH: Tensor
    """Outputs of the captured layers, rejected rows included."""
    num_accepted_S: Tensor
    """int64: drafts that now stand for good."""
    newest_S: Tensor
    """int64: each sequence's newest token, or any value where it has not sampled."""

    @classmethod
    def receive(
        cls,
        rows: Sequence[ScheduledRows],
        feature_shape: tuple[int, int],
        link: PointToPoint,
        dtype: torch.dtype,
        device: torch.device,
    ) -> VerifiedBatch:
        """What the target found for a plan's `rows`; `feature_shape` is (F, H)."""
        num_rows = sum(r.num_known + r.num_drafts for r in rows)
        features_TFH = torch.empty((num_rows, *feature_shape), dtype=dtype, device=device)
        counts_2S = torch.empty((2, len(rows)), dtype=torch.int64, device=device)
        link.receive(features_TFH, 0)
        link.receive(counts_2S, 0)
        return cls(features_TFH, *counts_2S.unbind(0))

    def send(self, link: PointToPoint, to: int) -> None:
        """To the drafter's worker."""
        link.send(self.features_TFH, to)
        link.send(torch.stack([self.num_accepted_S, self.newest_S]), to)


def _places(rows: Sequence[ScheduledRows], device: torch.device) -> tuple[Tensor, Tensor]:
    """Slot and column of every draft of the step."""
    places = [(r.slot, r.start + r.num_known + i) for r in rows for i in range(r.num_drafts)]
    slot_R, column_R = to_device(places, device).view(-1, 2).unbind(1)
    return slot_R, column_R
