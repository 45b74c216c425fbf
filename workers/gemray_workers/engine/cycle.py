"""One cycle on the device: draft, forward, verify, commit, over the rows of a plan.

Nothing here reads the device or follows its values: every shape is the plan's, every place of memory is the same in
each cycle. So the host may enqueue a cycle while the one before still runs, and a CUDA graph may hold it.

Every rank runs the same cycle. What the ranks exchange is visible in the model (all-reduces) and in the choice of
tokens (candidates).

Shape legend: A sequences and the null slot, T rows, U of them whose output is used, R rows that choose a token, C
sequences that may choose, J most drafts and one, H hidden size, V vocabulary rows of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from gemray_kernels.sequence_tables import RowLayout
from gemray_workers.drafters.protocol import Drafter
from gemray_workers.execution.cycle_rows import CyclePlan, CycleRows, PackedRows, advance
from gemray_workers.execution.slots import SlotTable
from gemray_workers.kv.cache import KVCaches
from gemray_workers.model.batch import ForwardOutput
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.sampling.choose import choose
from gemray_workers.sampling.row_masks import MakeMasks, RowMasks
from gemray_workers.sampling.state import drafts_before
from gemray_workers.sampling.verify import Accept, verify


@dataclass(frozen=True)
class CycleOutput:
    """What a cycle leaves behind for the host."""

    found_CK: Tensor | None
    """int64 [C, 2 + J], see `Settled.found`; None when no sequence could choose."""
    logits_RV: Tensor | None
    """Before the soft-cap, of the rows that chose, row ``c J + i`` behind the first i drafts of sequence c."""
    hidden_UH: Tensor
    """Post-norm hidden states of the rows whose output is used."""
    first_A: Tensor
    """Index into U of each sequence's first one."""
    is_narrowed: bool
    """Whether U leaves rows out: all but the last of each sequence, as many as `ScheduledRows.num_outputs` and the
    drafts."""


OutputT_co = TypeVar("OutputT_co", covariant=True)


class CycleRunner(Protocol[OutputT_co]):
    """What enqueues a plan's cycle: kernel by kernel, or as graphs.

    It stands around the whole cycle and not around the model, because a graph holds drafting as well: the target and
    the drafters beside it run behind these verbs. So does a drafter on a rank of its own (`DrafterCycle`).
    """

    def fit(self, plan: CyclePlan) -> CyclePlan:
        """The plan in the shape in which it will run: at least as roomy as its own."""
        ...

    def draft(self, plan: CyclePlan, table_S6: Tensor) -> None:
        """Put drafts behind the newest tokens; `plan` is a fitted one, `table_S6` its table on the device."""
        ...

    def decide(self, plan: CyclePlan, table_S6: Tensor, masks: MakeMasks | None = None) -> OutputT_co:
        """Verify the drafts and move every sequence on; `masks` makes those of the rectangle's rows."""
        ...


@dataclass(frozen=True)
class Decision:
    """What the target has decided."""

    accepted_A: Tensor
    """Drafts that now stand for good."""
    found_CK: Tensor | None
    logits_RV: Tensor | None


class Cycle:
    """The device's part of a step."""

    def __init__(
        self,
        *,
        model: TargetModel,
        caches: KVCaches,
        slots: SlotTable,
        drafter: Drafter,
        captured_layers: tuple[int, ...],
        comm: Communicator,
        accept: Accept = verify,
    ) -> None:
        """Over a model, its caches and the slots' tables; `accept` stands in for the rule in measurements."""
        self._model = model
        self._caches = caches
        self._slots = slots
        self._drafter = drafter
        self._captured_layers = captured_layers
        self._comm = comm
        self._accept = accept

    def fit(self, plan: CyclePlan) -> CyclePlan:
        """The plan, with `Features.in_few_programs`."""
        return replace(plan, features=self._slots.sampling.in_few_programs(plan.features))

    def draft(self, plan: CyclePlan, table_S6: Tensor) -> None:
        """Put proposed tokens behind the newest one of each sequence that asks for drafts.

        Args:
            plan: the rows as the host granted them.
            table_S6: `plan.table` on the device.
        """
        if plan.shape.num_drafting:
            self._drafter.propose(CycleRows.of(plan, table_S6, self._slots), self._slots)

    def decide(self, plan: CyclePlan, table_S6: Tensor, masks: MakeMasks | None = None) -> CycleOutput:
        """Compute the plan's rows, choose tokens, and move every sequence on.

        Args:
            plan: as of `draft`.
            table_S6: as of `draft`.
            masks: makes the masks of the rectangle's rows; called once the forward pass is enqueued.
        """
        rows = CycleRows.of(plan, table_S6, self._slots)
        packed, output = self.forward(rows)
        verified = self.verify(rows, packed, output, None if masks is None else masks())
        self.commit(rows, packed, output, verified.accepted_A)
        return CycleOutput(
            verified.found_CK,
            verified.logits_RV,
            output.hidden_UH,
            packed.outputs.layout.first_A,
            packed.narrowed is not None,
        )

    def forward(self, rows: CycleRows) -> tuple[PackedRows, ForwardOutput]:
        """Run the target once over prompt chunks and verify rows alike."""
        packed = rows.batch(self._slots)
        output = self._model.forward(
            packed.forward, self._caches, capture=self._captured_layers, outputs=packed.output_rows
        )
        return packed, output

    def verify(
        self, rows: CycleRows, packed: PackedRows, output: ForwardOutput, row_masks: RowMasks | None = None
    ) -> Decision:
        """Choose each row's token and keep the drafts that equal it."""
        if not rows.shape.num_choosing:
            return Decision(torch.zeros_like(rows.drafts_A), None, None)
        slots, layout, features = self._slots, packed.outputs.layout, rows.plan.features
        logits_RV = self._model.uncapped_logits(output.hidden_UH[layout.row_RQ.flatten()])
        choice = choose(
            logits_RV,
            layout.slot_RQ.flatten(),
            layout.position_RQ.flatten(),
            slots.sampling,
            self._comm,
            features=features,
            drafts_RB=drafts_before(self._input_ids(layout)) if features.penalties else None,
            row_masks=row_masks,
            softcap=self._model.softcap,
        )
        chosen_CJ = choice.ids_R.view_as(layout.position_RQ)
        settled = slots.row_kernels.settle(
            rows.cut_5A, chosen_CJ, slots.tables, self._verified(rows, layout, chosen_CJ)
        )
        if features.penalties:
            slots.sampling.commit(layout.slot_RQ[:, 0], settled.ids_RQ)
        return Decision(settled.accepted_A, settled.found, logits_RV)

    def _input_ids(self, layout: RowLayout) -> Tensor:
        """[C, J]: the known token that each sequence's first row that chooses computes, then its drafts."""
        before_C1 = (layout.position_RQ[:, :1] - 1).clamp(min=0)
        return self._slots.token_ids_NL[layout.slot_RQ, torch.cat([before_C1, layout.position_RQ[:, :-1]], dim=1)]

    def _verified(self, rows: CycleRows, layout: RowLayout, chosen_CJ: Tensor) -> tuple[Tensor, Tensor] | None:
        """What stands in for the rule of verification, in measurements."""
        if self._accept is verify:
            return None
        drafts_CK = self._slots.token_ids_NL[layout.slot_RQ[:, :-1], layout.position_RQ[:, :-1]]
        verified = self._accept(drafts_CK, rows.drafts_A[: rows.shape.num_choosing], chosen_CJ)
        return verified.num_accepted_S, verified.ids_SJ

    def commit(self, rows: CycleRows, packed: PackedRows, output: ForwardOutput, accepted_A: Tensor) -> None:
        """Move the drafter's view and the lengths past the known rows and the accepted drafts."""
        self._drafter.commit(rows, packed, self._slots, output, accepted_A)
        advance(rows, accepted_A, self._slots)
