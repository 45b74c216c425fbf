"""What the engine asks of a drafter, and what a drafter declares about itself.

MTP and DFlash are two implementations, and both together a third; the engine never tests which one it has. A
`DrafterPlan` is made from configs alone, so that mistakes show before any weight is read and pools can be sized; it
then builds the `Drafter`.

Shape legend: A sequences of a cycle and the null slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from gemray_workers.attention.choice import AttentionNeeds
from gemray_workers.checkpoint.loader import ProgressFn
from gemray_workers.execution.cycle_rows import CycleRows, PackedRows
from gemray_workers.execution.slots import SlotTable
from gemray_workers.kv.cache import KVCaches
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.model.attention import AttentionKernel
from gemray_workers.model.batch import ForwardOutput
from gemray_workers.model.config import LayerConfig
from gemray_workers.model.vocab_parallel import VocabParallelEmbedding, VocabParallelTable
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.shard_indices import ShardIndices


@dataclass(frozen=True, kw_only=True)
class DrafterTraits:
    """Facts about a drafter that the scheduler, the pools and the target's forward need, as data."""

    method: Literal["none", "mtp", "dflash", "mtp+dflash"]
    kv: Literal["none", "shared", "own"]
    """``shared`` reads the target's cache and owns none; ``own`` brings KV groups of its own."""
    num_draft_tokens: int
    captured_layers: tuple[int, ...] = ()
    """Target layers whose outputs it wants from every forward pass."""
    path: str = ""
    """Its checkpoint's directory; empty where there is none, or more than one."""


@dataclass(frozen=True, kw_only=True)
class DrafterParts:
    """What a drafter is built from, once target and pools exist."""

    embedding: VocabParallelEmbedding
    """The target's: what tokens look like to a drafter."""
    head_table: VocabParallelTable
    """The target's: what scores a DFlash block. The embedding itself in most checkpoints."""
    shard: ShardIndices
    """The vocabulary rows of both."""
    target_caches: KVCaches | None
    """None on a worker of the drafter's own."""
    own_caches: KVCaches | None
    """Over the plan's `kv_specs`, when it has any."""
    comm: Communicator
    num_slots: int
    dtype: torch.dtype
    device: torch.device
    attention: Sequence[AttentionKernel]
    """The kernels of the backends chosen for the plan's `needs`."""
    progress: ProgressFn | None = None


class Drafter(Protocol):
    """Proposes tokens for sequences whose next token is about to be computed."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own weights on this rank; what it borrows of the target is the target's."""
        ...

    def propose(self, rows: CycleRows, slots: SlotTable) -> None:
        """Write drafts behind the newest token of each of the first `num_drafting` sequences.

        What is written behind the ``drafts_A`` that a sequence has room for is never read.
        """
        ...

    def commit(
        self, rows: CycleRows, packed: PackedRows, slots: SlotTable, output: ForwardOutput, accepted_A: Tensor
    ) -> None:
        """Follow the target: of each sequence the known rows and `accepted_A` drafts are now committed.

        Args:
            rows: the cycle's.
            packed: where they lie in `output`.
            slots: the sequences, lengths still as before the cycle.
            output: the target's: features of every row, hidden states of `packed.outputs`.
            accepted_A: int64; 0 where nothing was chosen, and for the null slot.
        """
        ...

    def reset(self, slot: int) -> None:
        """Forget what is kept for a slot (its sequence ended, or starts over)."""
        ...


class DrafterPlan(Protocol):
    """A drafter that could be built: its config has been read and checked against the target's."""

    @property
    def traits(self) -> DrafterTraits:
        """What the drafter declares, or several together."""
        ...

    @property
    def members(self) -> tuple[DrafterTraits, ...]:
        """What each drafter behind this plan declares: none, one or two. Rows name a drafter by its place here."""
        ...

    @property
    def needs(self) -> tuple[AttentionNeeds, ...]:
        """What each one's attention asks of a backend."""
        ...

    @property
    def kv_specs(self) -> tuple[KVGroupSpec, ...]:
        """KV groups of its own on one rank; empty when it shares the target's."""
        ...

    @property
    def kv_layers(self) -> tuple[LayerConfig, ...]:
        """The layers that own KV in `kv_specs`."""
        ...

    def check_weights(self) -> None:
        """Compare what is on disk with what `build` will read, without memory for it.

        Raises:
            CheckpointError: as `build` does.
        """
        ...

    def build(self, parts: DrafterParts) -> Drafter:
        """Read the weights. Every rank must be building.

        Raises:
            CheckpointError: the drafter's checkpoint is missing, damaged or of another shape.
        """
        ...


class NoDrafter:
    """Plain decoding: the plan and the drafter that never proposes."""

    traits = DrafterTraits(method="none", kv="none", num_draft_tokens=0)
    members: tuple[DrafterTraits, ...] = ()
    needs: tuple[AttentionNeeds, ...] = ()
    weight_bytes = 0
    kv_specs: tuple[KVGroupSpec, ...] = ()
    kv_layers: tuple[LayerConfig, ...] = ()

    def check_weights(self) -> None:
        """Nothing to compare."""

    def build(self, parts: DrafterParts) -> Drafter:
        """Nothing to read."""
        return self

    def propose(self, rows: CycleRows, slots: SlotTable) -> None:
        """Write nothing: no sequence is scheduled with drafts."""

    def commit(
        self, rows: CycleRows, packed: PackedRows, slots: SlotTable, output: ForwardOutput, accepted_A: Tensor
    ) -> None:
        """Do nothing: it keeps no state."""

    def reset(self, slot: int) -> None:
        """Do nothing: it keeps no state."""
