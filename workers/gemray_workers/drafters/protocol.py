"""What the engine asks of a drafter, and what a drafter declares about itself.

MTP and DFlash are two implementations; the engine never tests which one it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from gemray_workers.model.batch import ForwardBatch, ForwardOutput
from gemray_workers.scheduling.plan import ScheduledRows

if TYPE_CHECKING:
    from gemray_workers.engine.slots import SlotTable


@dataclass(frozen=True, kw_only=True)
class DrafterTraits:
    """Facts about a drafter that the scheduler, the pools and the target's forward need, as data."""

    method: Literal["none", "mtp", "dflash"]
    kv: Literal["none", "shared", "own"]
    """``shared`` reads the target's cache and owns none; ``own`` brings KV groups of its own."""
    max_draft_tokens: int
    captured_layers: tuple[int, ...] = ()
    """Target layers whose outputs it wants from every forward pass."""


class Drafter(Protocol):
    """Proposes tokens for sequences whose next token is about to be computed."""

    @property
    def traits(self) -> DrafterTraits:
        """What this drafter declares."""
        ...

    def propose(self, rows: Sequence[ScheduledRows], slots: SlotTable) -> None:
        """Write ``num_drafts`` tokens behind the last known token of each sequence that asks for any."""
        ...

    def commit(
        self,
        rows: Sequence[ScheduledRows],
        batch: ForwardBatch,
        output: ForwardOutput,
        num_accepted: Sequence[int],
    ) -> None:
        """Follow the target: of each sequence the known rows and `num_accepted` drafts are now committed."""
        ...

    def reset(self, slot: int) -> None:
        """Forget what is kept for a slot (its sequence ended, or starts over)."""
        ...


class NoDrafter:
    """Plain decoding: the drafter that never proposes."""

    traits = DrafterTraits(method="none", kv="none", max_draft_tokens=0)

    def propose(self, rows: Sequence[ScheduledRows], slots: SlotTable) -> None:
        """Write nothing: no sequence is scheduled with drafts."""

    def commit(
        self,
        rows: Sequence[ScheduledRows],
        batch: ForwardBatch,
        output: ForwardOutput,
        num_accepted: Sequence[int],
    ) -> None:
        """Keep nothing."""

    def reset(self, slot: int) -> None:
        """Hold nothing that could be forgotten."""
