"""The drafts of a step's sampling sequences, on the device: padded for verification, and committed by it.

Shape legend: S sequences that sample, K most drafts of one in this step, K1 = K + 1, R rows that choose a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_workers.engine.slots import SlotTable
from gemray_workers.sampling.verify import Verified
from gemray_workers.scheduling.plan import ScheduledRows


@dataclass(frozen=True)
class Drafts:
    """Where each sequence's drafts stand and what they are."""

    slot_S1: Tensor
    """int64 [S, 1]."""
    offset_SK1: Tensor
    """int64: 0 to a sequence's number of drafts, which padding repeats."""
    column_SK1: Tensor
    """int64: positions of the drafts, and one more; behind a sequence's own they are padding."""
    ids_SK: Tensor
    num_S: Tensor
    """int64: drafts of each sequence."""
    row_SK1: Tensor
    """int64: index into R of each verify row; padding repeats a sequence's last."""
    sequence_R: Tensor
    """int64: index into S of each verify row."""
    slot_R: Tensor
    """int64: of each verify row."""
    position_R: Tensor
    """int64: where the token that a verify row chooses will stand."""

    @classmethod
    def of(cls, rows: Sequence[ScheduledRows], slots: SlotTable) -> Drafts:
        """The drafts that stand in the slot table for these sequences."""
        widest = max(r.num_drafts for r in rows)
        # One copy to the device: slot, known rows, drafts, first row.
        facts, first_row = [], 0
        for r in rows:
            facts.append((r.slot, r.num_known, r.num_drafts, first_row))
            first_row += r.num_drafts + 1
        slot_S, known_S, num_S, first_S = torch.tensor(facts).to(slots.device, non_blocking=True).unbind(1)
        start_S = slots.computed_N[slot_S] + known_S
        sequence_R = torch.repeat_interleave(
            torch.arange(len(rows), device=slots.device), num_S + 1, output_size=first_row
        )
        row_R = torch.arange(first_row, device=slots.device)
        offset_SK1 = torch.arange(widest + 1, device=slots.device).minimum(num_S[:, None])
        column_SK1 = start_S[:, None] + offset_SK1
        return cls(
            slot_S1=slot_S[:, None],
            offset_SK1=offset_SK1,
            column_SK1=column_SK1,
            ids_SK=slots.token_ids_NL[slot_S[:, None], column_SK1[:, :-1]],
            num_S=num_S,
            row_SK1=first_S[:, None] + offset_SK1,
            sequence_R=sequence_R,
            slot_R=slot_S[sequence_R],
            position_R=start_S[sequence_R] + row_R - first_S[sequence_R],
        )

    def before_rows(self) -> Tensor:
        """The drafts that stand before each verify row, int64 [R, K]; -1 behind them."""
        num_before_R = self.position_R - self.column_SK1[self.sequence_R, 0]
        place_K = torch.arange(self.ids_SK.shape[1], device=self.ids_SK.device)
        return self.ids_SK[self.sequence_R].where(place_K < num_before_R[:, None], -1)

    def by_sequence(self, ids_R: Tensor) -> Tensor:
        """One value a row, laid out [S, K + 1]."""
        return ids_R[self.row_SK1]

    def commit(self, verified: Verified, slots: SlotTable) -> None:
        """Put what verification emits into the slot table, over the drafts."""
        slots.accepted_N[self.slot_S1[:, 0]] = verified.num_accepted_S
        old_SK1 = slots.token_ids_NL[self.slot_S1, self.column_SK1]
        new_SK1 = torch.where(verified.ids_SK1 >= 0, verified.ids_SK1, old_SK1)
        # Padding names a sequence's last column again, so it must bring the same value.
        slots.token_ids_NL[self.slot_S1, self.column_SK1] = new_SK1.gather(1, self.offset_SK1)
