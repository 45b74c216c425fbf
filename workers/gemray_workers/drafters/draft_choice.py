"""Drafts are chosen as the target chooses tokens: the same noise, edits and filters on the drafter's logits.

With the shared noise a draft equals the target's token wherever the two distributions are close, which at T > 0
happens more often than for a greedy draft (arXiv 2408.07978). A draft never changes what is emitted.

Shape legend: S sequences, R rows, V local vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from torch import Tensor

from gemray_workers.engine.slots import SlotTable
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.chooser import choose_tokens
from gemray_workers.sampling.noise import noise_for
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.rows import RowRequest


class DraftChooser:
    """Chooses drafts at given positions behind the newest token of sequences."""

    def __init__(self, shard: ShardIndices, comm: Communicator) -> None:
        self._shard = shard
        self._comm = comm

    def choose(
        self,
        logits_RV: Tensor,
        slot_R: Tensor,
        position_R: Tensor,
        wanted: Iterable[tuple[int, int]],
        slots: SlotTable,
    ) -> Tensor:
        """One draft a row, int64 [R]; id 0 where the logits are unusable: verification judges it like any other.

        Args:
            logits_RV: the drafter's local logits in the compute dtype.
            slot_R: for each row, the sequence's slot.
            position_R: for each row, the position at which the draft would stand.
            wanted: the same two numbers as the host knows them.
            slots: the sequences.
        """
        requests = [
            RowRequest(
                params=_without_penalties(slots[slot].params),
                position=position,
                prompt_len=min(slots[slot].prompt_len, position),
            )
            for slot, position in wanted
        ]
        rows = slots.sampling.rows(slot_R, position_R, requests)
        noise = noise_for(logits_RV.device)
        return choose_tokens(logits_RV, rows, self._shard, self._comm, noise=noise).ids_R.clamp(min=0)


def _without_penalties(params: SamplingParams) -> SamplingParams:
    """Penalties depend on drafts that are not decided yet; drafting without them costs acceptance, never ids."""
    if params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
        return params
    return msgspec.structs.replace(params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
