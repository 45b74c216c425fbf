"""Drafting with the MTP assistant: k sequential one-token steps on the target's KV (spec 4.6).

Between rounds a sequence's state is one vector: the target's hidden state of its last committed row, the row that
chose its newest token. The drafter has no KV, so there is nothing to roll back.

Shape legend: D sequences that draft, A sequences of the cycle and the null slot, N slots, H the target's hidden size,
V local vocabulary rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_workers.checkpoint.target import bytes_held
from gemray_workers.drafters.draft_choice import DraftChooser
from gemray_workers.drafters.mtp.assistant import AssistantModel
from gemray_workers.execution.cycle_rows import CycleRows, PackedRows
from gemray_workers.execution.slots import SlotTable
from gemray_workers.kv.cache import KVCaches
from gemray_workers.model.batch import ForwardBatch, ForwardOutput, GroupMetadata
from gemray_workers.model.vocab_parallel import VocabParallelEmbedding


class MTPDrafter:
    """The assistant beside the target, on every rank."""

    def __init__(
        self,
        assistant: AssistantModel,
        embedding: VocabParallelEmbedding,
        caches: KVCaches,
        chooser: DraftChooser,
        *,
        num_slots: int,
        position_delta: int = 0,
    ) -> None:
        """A drafter with no state.

        Args:
            assistant: its weights.
            embedding: the target's.
            caches: the target's caches, to read.
            chooser: over the target's vocabulary shard.
            num_slots: sequences at one time.
            position_delta: 0 drafts at the newest token's own position, as transformers does; -1 at the one
                before it, as some engines do (spec 4.3). Changes what is proposed, never what is emitted.
        """
        self._assistant = assistant
        self._embedding = embedding
        self._caches = caches
        self._position_delta = position_delta
        self._chooser = chooser
        self._state_NH = embedding.table_VH.new_zeros(num_slots + 1, assistant.config.backbone_hidden_size)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the assistant's shard."""
        return bytes_held(self._assistant.weight_targets())

    def propose(self, rows: CycleRows, slots: SlotTable) -> None:
        """Draft one token after the other, for all sequences alike: what is too much for one is never read."""
        slot_D, committed_D = rows.drafting(slots)
        batch = self._one_query_each(slot_D, committed_D, slots)
        token_D = slots.token_ids_NL[slot_D, committed_D]
        state_DH = self._state_NH[slot_D]
        rope = self._assistant.angles(batch.positions_T)
        for i in range(rows.shape.max_drafts):
            logits_DV, state_DH = self._assistant.step(self._embedding(token_D), state_DH, rope, batch, self._caches)
            position_D = committed_D + (1 + i)
            token_D = self._chooser.choose(
                logits_DV, slot_D, position_D, slots.sampling, rows.plan.features, self._assistant.softcap
            )
            slots.token_ids_NL[slot_D, position_D] = token_D

    def commit(
        self, rows: CycleRows, packed: PackedRows, slots: SlotTable, output: ForwardOutput, accepted_A: Tensor
    ) -> None:
        """Keep the hidden state of each sequence's last committed row."""
        committed_A = rows.known_A + accepted_A
        row_A = (packed.first_A + committed_A - 1).clamp(min=0)
        # A sequence without a row keeps its state: the null slot takes what was read instead.
        slot_A = torch.where(committed_A > 0, rows.slot_A, slots.null_slot)
        self._state_NH[slot_A] = output.hidden_TH[row_A]

    def reset(self, slot: int) -> None:
        """The state is written by the first chunk of a new sequence, before it is ever read."""

    def _one_query_each(self, slot_D: Tensor, committed_D: Tensor, slots: SlotTable) -> ForwardBatch:
        """One query a sequence that sees the committed keys and no more; the same for all steps of a round."""
        nothing_written_D = torch.zeros_like(slot_D)
        return ForwardBatch(
            token_ids_T=slot_D,  # unused: the assistant is given embeddings
            positions_T=(committed_D + self._position_delta).clamp(min=0),
            query_start_Z=torch.arange(len(slot_D) + 1, dtype=torch.int32, device=slot_D.device),
            kv_len_S=committed_D.to(torch.int32),
            groups={
                name: GroupMetadata(table_NP[slot_D], nothing_written_D)
                for name, table_NP in slots.block_tables_NP.items()
            },
        )
