"""From a step plan to the rows of one cycle: shapes that the host knows, and counts that only the device knows.

The host plans a cycle while the one before may still run, so it does not know where a sequence stands. It knows how
many rows it grants each sequence; the device cuts them where the sequence reaches its end, packs them one sequence
behind the other, and gives the rows that are left over to the null slot. Every shape follows from `CycleShape` alone,
so a CUDA graph can hold all that is computed here.

Shape legend: S sequences of the plan, A = S + 1 (the null slot stands behind them), D of them draft, C of them may
choose tokens, K most drafts of one, J = K + 1, T rows, Z = A + 1 bounds of their rows, P block-table columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_workers.execution.slots import SlotTable
from gemray_workers.model.batch import ForwardBatch, GroupMetadata
from gemray_workers.sampling.features import Features
from gemray_workers.sampling.state import SamplingState
from gemray_workers.scheduling.plan import ScheduledRows


@dataclass(frozen=True)
class CycleShape:
    """What the host knows of a cycle; cycles of equal shape run the same kernels."""

    num_sequences: int
    num_drafting: int
    """The first so many have drafts."""
    num_choosing: int
    """The first so many may choose tokens, those that draft among them."""
    max_drafts: int
    num_rows: int
    """Room for rows."""
    num_block_rows: int
    """Room for the newest token and the drafts of the sequences that draft."""


@dataclass(frozen=True)
class CyclePlan:
    """A step plan's rows in a cycle's order, as the host granted them."""

    scheduled: Sequence[ScheduledRows]
    """Sequences that draft, then others that choose a token, then prompt chunks that choose none."""
    shape: CycleShape
    features: Features
    """What the choice of tokens consists of: all that the sequences need, or more."""

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledRows], sampling: SamplingState) -> CyclePlan:
        """Sort the rows; sequences of one kind keep their order."""
        ordered = sorted(scheduled, key=lambda r: (r.num_drafts == 0, not r.samples))
        drafts = [r.num_drafts for r in ordered if r.num_drafts]
        return cls(
            ordered,
            CycleShape(
                num_sequences=len(ordered),
                num_drafting=len(drafts),
                num_choosing=sum(r.samples for r in ordered),
                max_drafts=max(drafts, default=0),
                num_rows=sum(r.num_known + r.num_drafts for r in ordered),
                num_block_rows=len(drafts) + sum(drafts),
            ),
            sampling.features_of(r.slot for r in scheduled if r.samples),
        )

    def table(self, null_slot: int) -> Tensor:
        """int64 [A, 4] on the host: slot, known rows, drafts, whether it chooses a token; the null slot's behind."""
        facts = [(r.slot, r.num_known, r.num_drafts, int(r.samples)) for r in self.scheduled]
        padding = [(null_slot, 0, 0, 0)] * (self.shape.num_sequences + 1 - len(facts))
        return torch.tensor(facts + padding, dtype=torch.int64)


@dataclass(frozen=True)
class CycleRows:
    """The sequences of a cycle and the rows that are left of what they were granted."""

    plan: CyclePlan
    slot_A: Tensor
    start_A: Tensor
    """Tokens computed before the cycle: position of the first row."""
    known_A: Tensor
    """Rows of tokens that are decided; 0 where the sequence has reached its end."""
    drafts_A: Tensor
    """Rows of drafts behind them; as many as could still be emitted, at most."""
    chooses_A: Tensor
    """bool."""

    @classmethod
    def of(cls, plan: CyclePlan, table_S4: Tensor, slots: SlotTable) -> CycleRows:
        """Cut what was granted to what each sequence has room for.

        Args:
            plan: what the host knows.
            table_S4: `plan.table` on the device.
            slots: where the sequences stand.
        """
        slot_A, known_A, drafts_A, samples_A = table_S4.unbind(1)
        start_A = slots.computed_N[slot_A]
        room_A = slots.end_N[slot_A] - start_A - known_A
        is_sampling_A = samples_A > 0
        chooses_A = is_sampling_A & (room_A > 0)
        return cls(
            plan=plan,
            slot_A=slot_A,
            start_A=start_A,
            known_A=known_A * (chooses_A | ~is_sampling_A),
            drafts_A=drafts_A.minimum(room_A - 1).clamp(min=0) * chooses_A,
            chooses_A=chooses_A,
        )

    @property
    def shape(self) -> CycleShape:
        """What the host knows."""
        return self.plan.shape

    def drafting(self, slots: SlotTable) -> tuple[Tensor, Tensor]:
        """(slot, start) of the sequences that draft, [D] each: the null slot and 0 for those that have no room.

        In a padded shape that is also a prompt chunk's entry, behind whose rows stand tokens that must stay.
        """
        drafts_D = self.drafts_A[: self.shape.num_drafting]
        slot_D = self.slot_A[: self.shape.num_drafting]
        start_D = self.start_A[: self.shape.num_drafting]
        return torch.where(drafts_D > 0, slot_D, slots.null_slot), start_D * (drafts_D > 0)

    def batch(self, slots: SlotTable) -> PackedRows:
        """All rows, known tokens and drafts. Drafts must be in the slot table already."""
        return PackedRows.of(self, self.known_A + self.drafts_A, self.shape.num_rows, slots, slots.groups)

    def blocks(self, slots: SlotTable, groups: Sequence[str]) -> PackedRows:
        """The newest token of each sequence that drafts and the places of its drafts, in the KV groups named."""
        count_A = (self.drafts_A + 1) * (self.drafts_A > 0)
        return PackedRows.of(self, count_A, self.shape.num_block_rows, slots, groups)


@dataclass(frozen=True)
class PackedRows:
    """Rows of several sequences one behind the other, addressed in the slot table's KV groups."""

    forward: ForwardBatch
    first_A: Tensor
    """int64: index into T of each sequence's first row."""
    sequence_T: Tensor
    """int64: index into A."""
    offset_T: Tensor
    """int64: of a row within its sequence."""

    @classmethod
    def of(cls, rows: CycleRows, count_A: Tensor, num_rows: int, slots: SlotTable, groups: Sequence[str]) -> PackedRows:
        """Lay out `count_A` rows a sequence, from its first uncomputed token on, and leave the rest to the null slot.

        Rows of the null slot stand at position 0, see no key, and write to the null page.
        """
        end_A = count_A.cumsum(0)
        end_A[-1:].fill_(num_rows)
        first_A = torch.cat([end_A.new_zeros(1), end_A[:-1]])
        row_T = torch.arange(num_rows, device=end_A.device)
        sequence_T = torch.searchsorted(end_A, row_T, right=True)
        offset_T = row_T - first_A[sequence_T]
        positions_T = (rows.start_A[sequence_T] + offset_T) * (sequence_T < len(count_A) - 1)
        slot_T = rows.slot_A[sequence_T]
        forward = ForwardBatch(
            token_ids_T=slots.token_ids_NL[slot_T, positions_T],
            positions_T=positions_T,
            query_start_Z=torch.cat([first_A, end_A[-1:]]).to(torch.int32),
            kv_len_S=((rows.start_A + count_A) * (count_A > 0)).to(torch.int32),
            groups={group: _address(slots, group, rows.slot_A, slot_T, positions_T) for group in groups},
        )
        return cls(forward, first_A, sequence_T, offset_T)


def _address(slots: SlotTable, group: str, slot_A: Tensor, slot_T: Tensor, positions_T: Tensor) -> GroupMetadata:
    table_NP, page_size = slots.block_tables_NP[group], slots.page_size[group]
    page_T = table_NP[slot_T, positions_T // page_size].long()
    return GroupMetadata(table_NP[slot_A], page_T * page_size + positions_T % page_size)


def advance(rows: CycleRows, accepted_A: Tensor, slots: SlotTable) -> None:
    """The known rows and the accepted drafts are computed."""
    slots.computed_N.index_add_(0, rows.slot_A, rows.known_A + accepted_A)
