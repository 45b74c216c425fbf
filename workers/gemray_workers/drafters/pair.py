"""An MTP and a DFlash drafter in one gang: each drafts for the sequences whose rows name it, and both follow all.

What a drafter keeps between rounds is kept up to date for every sequence, whoever drafts for it: MTP's hidden vector
and DFlash's context rows. So either may take over in any step, and a text that the prefix cache finds serves both.
DFlash's context could also be filled in when it takes over, but only the target's forward pass has the features that
it is made of: a whole context would have to be computed again, or more bytes a token be kept than its KV takes. Kept up
to date it costs one projection and each layer's keys and values of the rows that a step has anyway.

Shape legend: A sequences of a cycle and the null slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from gemray_workers.attention.choice import AttentionNeeds
from gemray_workers.drafters.protocol import Drafter, DrafterParts, DrafterPlan, DrafterTraits
from gemray_workers.execution.cycle_rows import CycleRows, PackedRows
from gemray_workers.execution.slots import SlotTable
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.model.batch import ForwardOutput
from gemray_workers.model.config import LayerConfig


class PairPlan:
    """Both plans as one. MTP comes first: its steps run over the sequences that stand first in a cycle."""

    def __init__(self, mtp: DrafterPlan, dflash: DrafterPlan) -> None:
        """Over two plans for the same target; `dflash` alone captures layers and owns KV."""
        self._plans = (mtp, dflash)
        self.members: tuple[DrafterTraits, ...] = (*mtp.members, *dflash.members)
        self.traits = DrafterTraits(
            method="mtp+dflash",
            kv=dflash.traits.kv,
            num_draft_tokens=max(member.num_draft_tokens for member in self.members),
            captured_layers=dflash.traits.captured_layers,
        )
        self.needs: tuple[AttentionNeeds, ...] = (*mtp.needs, *dflash.needs)
        self.kv_specs: tuple[KVGroupSpec, ...] = dflash.kv_specs
        self.kv_layers: tuple[LayerConfig, ...] = dflash.kv_layers

    def check_weights(self) -> None:
        """Compare both."""
        for plan in self._plans:
            plan.check_weights()

    def build(self, parts: DrafterParts) -> Drafter:
        """Read the weights of both, one after the other."""
        drafters = [
            plan.build(replace(parts, attention=[kernel]))
            for plan, kernel in zip(self._plans, parts.attention, strict=True)
        ]
        return DrafterPair(drafters)


class DrafterPair:
    """Both drafters as one, on every rank."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        """`drafters` in the order of `PairPlan.members`."""
        self._drafters = tuple(drafters)

    @property
    def weight_bytes(self) -> int:
        """Bytes of both."""
        return sum(drafter.weight_bytes for drafter in self._drafters)

    def propose(self, rows: CycleRows, slots: SlotTable) -> None:
        """Let each one draft for its own sequences; one without any does nothing."""
        for number, drafter in enumerate(self._drafters):
            own = rows.of_drafter(number)
            if own.shape.num_drafting:
                drafter.propose(own, slots)

    def commit(
        self, rows: CycleRows, packed: PackedRows, slots: SlotTable, output: ForwardOutput, accepted_A: Tensor
    ) -> None:
        """Let both follow every sequence."""
        for drafter in self._drafters:
            drafter.commit(rows, packed, slots, output, accepted_A)

    def reset(self, slot: int) -> None:
        """Let both forget a slot."""
        for drafter in self._drafters:
            drafter.reset(slot)
