"""What the engine asks of a drafter, and what a drafter declares about itself.

MTP and DFlash are two implementations; the engine never tests which one it has. A `DrafterPlan` is made from
configs alone, so that mistakes show before any weight is read and pools can be sized; it then builds the `Drafter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from gemray_kernels.paged_attention import paged_attention
from gemray_workers.attention.choice import AttentionNeeds
from gemray_workers.checkpoint.loader import ProgressFn
from gemray_workers.engine.slots import SlotTable
from gemray_workers.kv.cache import KVCaches
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.model.attention import AttentionKernel
from gemray_workers.model.batch import ForwardBatch, ForwardOutput
from gemray_workers.model.config import LayerConfig
from gemray_workers.model.vocab_parallel import VocabParallelEmbedding
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.scheduling.plan import ScheduledRows


@dataclass(frozen=True, kw_only=True)
class DrafterTraits:
    """Facts about a drafter that the scheduler, the pools and the target's forward need, as data."""

    method: Literal["none", "mtp", "dflash"]
    kv: Literal["none", "shared", "own"]
    """``shared`` reads the target's cache and owns none; ``own`` brings KV groups of its own."""
    max_draft_tokens: int
    captured_layers: tuple[int, ...] = ()
    """Target layers whose outputs it wants from every forward pass."""


@dataclass(frozen=True, kw_only=True)
class DrafterParts:
    """What a drafter is built from, once target and pools exist."""

    embedding: VocabParallelEmbedding
    """The target's table: what tokens look like to a drafter, and what scores a DFlash block."""
    shard: ShardIndices
    """The vocabulary rows of `embedding`."""
    target_caches: KVCaches | None
    """None on a worker of the drafter's own."""
    own_caches: KVCaches | None
    """Over the plan's `kv_specs`, when it has any."""
    comm: Communicator
    num_slots: int
    dtype: torch.dtype
    device: torch.device
    attention: AttentionKernel = paged_attention
    """The kernel of the backend chosen for the drafter's layers."""
    progress: ProgressFn | None = None


class Drafter(Protocol):
    """Proposes tokens for sequences whose next token is about to be computed."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own weights on this rank; what it borrows of the target is the target's."""
        ...

    def propose(self, rows: Sequence[ScheduledRows], slots: SlotTable) -> None:
        """Write ``num_drafts`` tokens behind the last known token of each sequence that asks for any."""
        ...

    def commit(
        self,
        rows: Sequence[ScheduledRows],
        slots: SlotTable,
        batch: ForwardBatch,
        output: ForwardOutput,
        num_accepted: Sequence[int],
    ) -> None:
        """Follow the target: of each sequence the known rows and `num_accepted` drafts are now committed."""
        ...

    def reset(self, slot: int) -> None:
        """Forget what is kept for a slot (its sequence ended, or starts over)."""
        ...


class DrafterPlan(Protocol):
    """A drafter that could be built: its config has been read and checked against the target's."""

    @property
    def traits(self) -> DrafterTraits:
        """What the drafter declares."""
        ...

    @property
    def needs(self) -> AttentionNeeds | None:
        """What its attention asks of a backend; None when it has none."""
        ...

    @property
    def kv_specs(self) -> tuple[KVGroupSpec, ...]:
        """KV groups of its own on one rank; empty when it shares the target's."""
        ...

    @property
    def kv_layers(self) -> tuple[LayerConfig, ...]:
        """The layers that own KV in `kv_specs`."""
        ...

    def build(self, parts: DrafterParts) -> Drafter:
        """Read the weights. Every rank must be building.

        Raises:
            CheckpointError: the drafter's checkpoint is missing, damaged or of another shape.
        """
        ...


class NoDrafter:
    """Plain decoding: the plan and the drafter that never proposes."""

    traits = DrafterTraits(method="none", kv="none", max_draft_tokens=0)
    needs = None
    weight_bytes = 0
    kv_specs: tuple[KVGroupSpec, ...] = ()
    kv_layers: tuple[LayerConfig, ...] = ()

    def build(self, parts: DrafterParts) -> Drafter:
        """Nothing to read."""
        return self

    def propose(self, rows: Sequence[ScheduledRows], slots: SlotTable) -> None:
        """Write nothing: no sequence is scheduled with drafts."""

    def commit(
        self,
        rows: Sequence[ScheduledRows],
        slots: SlotTable,
        batch: ForwardBatch,
        output: ForwardOutput,
        num_accepted: Sequence[int],
    ) -> None:
        """Keep nothing."""

    def reset(self, slot: int) -> None:
        """Hold nothing that could be forgotten."""
