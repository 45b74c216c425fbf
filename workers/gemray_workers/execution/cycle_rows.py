"""From a step plan to the rows of one cycle: shapes that the host knows, and counts that only the device knows.

The host plans a cycle while the one before may still run, so it does not know where a sequence stands. It knows how
many rows it grants each sequence; the device cuts them where the sequence reaches its end, packs them one sequence
behind the other, and gives the rows that are left over to the null slot. Every shape follows from `CycleShape` alone,
so a CUDA graph can hold all that is computed here.

Shape legend: S sequences of the plan, A = S + 1 (the null slot stands behind them), D of them draft, C of them may
choose tokens, K most drafts of one, J = K + 1, T rows, U rows whose output is used, Z = A + 1 bounds of their rows,
P block-table columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch
from torch import Tensor

from gemray_kernels.reference.cycle_rows import drafting
from gemray_kernels.reference.paged_attention import FEW_ROWS
from gemray_kernels.sequence_tables import CutField, RowLayout
from gemray_workers.execution.slots import SlotTable
from gemray_workers.model.batch import ForwardBatch, GroupMetadata, OutputRows
from gemray_workers.sampling.features import Features
from gemray_workers.sampling.state import SamplingState
from gemray_workers.scheduling.plan import ScheduledRows


@dataclass(frozen=True)
class DraftShape:
    """What the host knows of the drafts that one drafter makes in a cycle."""

    num_drafting: int = 0
    """Sequences that come first, up to the last that it drafts for."""
    max_drafts: int = 0
    num_block_rows: int = 0
    """Room for the newest token and the drafts of those that it drafts for."""

    @classmethod
    def of(cls, drafters: Sequence[int], num_drafts: Sequence[int], drafter: int) -> DraftShape:
        """The shape of what `drafter` drafts, from each drafting sequence's drafter and number of drafts."""
        own = [i for i, d in enumerate(drafters) if d == drafter]
        if not own:
            return cls()
        return cls(own[-1] + 1, max(num_drafts[i] for i in own), sum(1 + num_drafts[i] for i in own))


@dataclass(frozen=True, kw_only=True)
class CycleShape:
    """What the host knows of a cycle; cycles of equal shape run the same kernels."""

    num_sequences: int
    num_drafting: int = 0
    """How many sequences have drafts; they come first."""
    num_choosing: int
    """How many may choose tokens, those that draft included; they come first."""
    max_drafts: int = 0
    num_rows: int
    """Room for rows."""
    most_rows: int
    """Rows of one sequence, at most."""
    num_block_rows: int = 0
    """Room for the newest token and the drafts of the sequences that draft."""
    num_outputs: int
    """Room for rows whose output is used; 0 where none is."""
    most_outputs: int
    """Such rows of one sequence, at most."""
    drafters: tuple[DraftShape, ...] = ()
    """Whose drafts they are, by drafter, up to the last that drafts; empty where the first drafter makes them all."""
    most_keys: int | None = field(default=None, compare=False)
    """Keys of a prompt chunk's sequence, at most; None where a captured cycle must hold any."""

    @property
    def by_drafter(self) -> tuple[DraftShape, ...]:
        """`drafters`, written out."""
        return self.drafters or (DraftShape(self.num_drafting, self.max_drafts, self.num_block_rows),)

    def holds(self, other: CycleShape) -> bool:
        """Whether a plan of the shape `other` can run in this one."""
        return (
            self.num_sequences >= other.num_sequences
            and self.max_drafts >= other.max_drafts
            and self.num_rows >= other.num_rows
            and self.most_rows >= other.most_rows
            and self.num_outputs >= other.num_outputs
            and self.most_outputs >= other.most_outputs
            and all(
                own.max_drafts >= theirs.max_drafts and own.num_block_rows >= theirs.num_block_rows
                for own, theirs in zip_longest(self.by_drafter, other.by_drafter, fillvalue=DraftShape())
            )
        )


def _most_keys(scheduled: Sequence[ScheduledRows]) -> int | None:
    """Keys of a sequence that has more rows than a decode or verify step, at most; None where the host does not know
    because such a sequence decodes."""
    long = [r for r in scheduled if r.num_known + r.num_drafts > FEW_ROWS]
    if any(r.num_known == 1 for r in long):
        return None
    return max((r.start + r.num_known + r.num_drafts for r in long), default=0)


@dataclass(frozen=True)
class CyclePlan:
    """A step plan's rows in a cycle's order, as the host granted them."""

    scheduled: Sequence[ScheduledRows]
    """Sequences that draft, those of the first drafter before those of another, then others that choose a token, then
    prompt chunks that choose none."""
    shape: CycleShape
    features: Features
    """What the choice of tokens consists of: all that the sequences need, or more."""

    @property
    def has_drafts(self) -> bool:
        """Whether a sequence was granted drafts. A roomier shape may have room for some where none was."""
        return bool(self.scheduled) and self.scheduled[0].num_drafts > 0

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledRows], sampling: SamplingState) -> CyclePlan:
        """Sort the rows; sequences of one kind keep their order."""
        ordered = sorted(scheduled, key=lambda r: (r.num_drafts == 0, r.drafter if r.num_drafts else 0, not r.samples))
        drafts = [r.num_drafts for r in ordered if r.num_drafts]
        drafters = [r.drafter for r in ordered if r.num_drafts]
        return cls(
            ordered,
            CycleShape(
                num_sequences=len(ordered),
                num_drafting=len(drafts),
                num_choosing=sum(r.samples for r in ordered),
                max_drafts=max(drafts, default=0),
                num_rows=sum(r.num_known + r.num_drafts for r in ordered),
                most_rows=max((r.num_known + r.num_drafts for r in ordered), default=0),
                num_block_rows=len(drafts) + sum(drafts),
                num_outputs=sum(r.num_outputs + r.num_drafts for r in ordered),
                most_outputs=max((r.num_outputs + r.num_drafts for r in ordered), default=0),
                drafters=tuple(DraftShape.of(drafters, drafts, d) for d in range(1 + max(drafters)))
                if any(drafters)
                else (),
                most_keys=_most_keys(ordered),
            ),
            sampling.features_of(r.slot for r in scheduled if r.samples),
        )

    def table(self, null_slot: int) -> Tensor:
        """int64 [A, 6] on the host: slot, known rows, drafts, whether it chooses a token, who drafts, known rows whose
        output is used; the null slot's behind."""
        facts = [(r.slot, r.num_known, r.num_drafts, int(r.samples), r.drafter, r.num_outputs) for r in self.scheduled]
        padding = [(null_slot, 0, 0, 0, 0, 0)] * (self.shape.num_sequences + 1 - len(facts))
        return torch.tensor(facts + padding, dtype=torch.int64)


@dataclass(frozen=True)
class CycleRows:
    """The sequences of a cycle and the rows that are left of what they were granted."""

    plan: CyclePlan
    cut_5A: Tensor
    """int64 [5, A], by `CutField`."""
    granted_S6: Tensor
    """What the host granted, as of `CyclePlan.table`."""

    @classmethod
    def of(cls, plan: CyclePlan, table_S6: Tensor, slots: SlotTable) -> CycleRows:
        """Cut what was granted to what each sequence has room for.

        Args:
            plan: what the host knows.
            table_S6: `plan.table` on the device.
            slots: where the sequences stand.
        """
        return cls(plan, slots.row_kernels.cut_rows(table_S6, slots.tables), table_S6)

    def of_drafter(self, drafter: int) -> CycleRows:
        """The same sequences, of which only those draft whose drafts `drafter` makes."""
        by_drafter = self.shape.by_drafter
        own = by_drafter[drafter] if drafter < len(by_drafter) else DraftShape()
        shape = replace(
            self.shape,
            num_drafting=own.num_drafting,
            max_drafts=own.max_drafts,
            num_block_rows=own.num_block_rows,
            drafters=(),
        )
        cut_5A = self.cut_5A
        if sum(part.max_drafts > 0 for part in by_drafter) > 1:
            cut_5A = cut_5A.clone()
            cut_5A[CutField.DRAFTS] *= self.granted_S6[:, 4] == drafter
        return CycleRows(replace(self.plan, shape=shape), cut_5A, self.granted_S6)

    @property
    def shape(self) -> CycleShape:
        """What the host knows."""
        return self.plan.shape

    @property
    def slot_A(self) -> Tensor:  # noqa: N802
        """Where each sequence stands in the slot table."""
        return self.cut_5A[CutField.SLOT]

    @property
    def start_A(self) -> Tensor:  # noqa: N802
        """Tokens computed before the cycle: position of the first row."""
        return self.cut_5A[CutField.START]

    @property
    def known_A(self) -> Tensor:  # noqa: N802
        """Rows of tokens that are decided; 0 where the sequence has reached its end."""
        return self.cut_5A[CutField.KNOWN]

    @property
    def drafts_A(self) -> Tensor:  # noqa: N802
        """Rows of drafts behind them; as many as could still be emitted, at most."""
        return self.cut_5A[CutField.DRAFTS]

    def drafting(self, slots: SlotTable) -> tuple[Tensor, Tensor]:
        """(slot, start) of the sequences that draft, [D] each: the null slot and 0 for those that have no room."""
        return drafting(self.cut_5A[:, : self.shape.num_drafting], slots.null_slot)

    def batch(self, slots: SlotTable) -> PackedRows:
        """All rows, known tokens and drafts, and the rectangle [C, J] of those that choose a token; among them, where
        they are not all, the rows whose output is used. Drafts must be in the slot table already."""
        packed = self.all_rows(slots)
        if self.shape.num_outputs >= self.shape.num_rows:
            return packed
        kernels = slots.row_kernels
        shape = replace(self.shape, num_rows=self.shape.num_outputs, most_rows=self.shape.most_outputs)
        cut_5A = kernels.cut_to_outputs(self.cut_5A, self.granted_S6)
        outputs = CycleRows(replace(self.plan, shape=shape), cut_5A, self.granted_S6).all_rows(slots)
        layout = outputs.layout
        place_U = kernels.output_places(
            self.cut_5A, cut_5A, packed.layout.first_A, layout.sequence_T, layout.offset_T, self.shape.num_rows
        )
        return replace(packed, narrowed=NarrowedRows(place_U, outputs))

    def all_rows(self, slots: SlotTable) -> PackedRows:
        """As `batch`, without telling whose output is used."""
        shape = self.shape
        rectangle = shape.num_choosing, shape.max_drafts + 1
        return PackedRows.of(
            self, slots, slots.groups, shape.num_rows, rectangle, shape.most_rows, None, most_keys=shape.most_keys
        )

    def blocks(self, slots: SlotTable, groups: Sequence[str], mask_id: int) -> PackedRows:
        """The newest token of each sequence that drafts and a mask for each of its drafts, in the KV groups named, and
        the rectangle [D, K] of the latter."""
        shape = self.shape
        rectangle = shape.num_drafting, shape.max_drafts
        return PackedRows.of(self, slots, groups, shape.num_block_rows, rectangle, 1 + shape.max_drafts, mask_id)


@dataclass(frozen=True)
class PackedRows:
    """Rows of several sequences one behind the other, addressed in the slot table's KV groups."""

    forward: ForwardBatch
    layout: RowLayout
    cut_5A: Tensor
    """The sequences that the rows belong to, by `CutField`."""
    narrowed: NarrowedRows | None = None
    """The rows among them whose output is used; None where that of all may be."""

    @property
    def outputs(self) -> PackedRows:
        """The rows that the target gives hidden states of."""
        return self if self.narrowed is None else self.narrowed.packed

    @property
    def output_rows(self) -> OutputRows | None:
        """As the target takes them."""
        return None if self.narrowed is None else OutputRows(self.narrowed.place_U, self.narrowed.packed.forward)

    @classmethod
    def of(
        cls,
        rows: CycleRows,
        slots: SlotTable,
        groups: Sequence[str],
        num_rows: int,
        rectangle: tuple[int, int],
        most_rows: int,
        block_mask: int | None,
        *,
        most_keys: int | None = None,
    ) -> PackedRows:
        """Lay out rows as `gemray_kernels.reference.cycle_rows.pack_rows` says."""
        layout = slots.row_kernels.pack_rows(
            rows.cut_5A,
            slots.tables,
            slots.pages(groups),
            num_rows=num_rows,
            rectangle=rectangle,
            block_mask=block_mask,
        )
        forward = ForwardBatch(
            token_ids_T=layout.token_ids_T,
            positions_T=layout.positions_T,
            query_start_Z=layout.query_start_Z,
            kv_len_S=layout.kv_len_A,
            groups={
                group: GroupMetadata(table_SP, index_T)
                for group, table_SP, index_T in zip(
                    groups, layout.block_tables, layout.kv_index_GT.unbind(), strict=True
                )
            },
            most_rows=most_rows,
            most_keys=most_keys,
        )
        return cls(forward, layout, rows.cut_5A)


@dataclass(frozen=True)
class NarrowedRows:
    """Some of a pass's rows, packed for themselves."""

    place_U: Tensor
    """int64: index of each into the rows that they were taken from."""
    packed: PackedRows
    """The rows: each sequence starts where its rows with outputs do."""


def advance(rows: CycleRows, accepted_A: Tensor, slots: SlotTable) -> None:
    """The known rows and the accepted drafts are computed."""
    slots.row_kernels.advance(rows.cut_5A, accepted_A, slots.tables)
