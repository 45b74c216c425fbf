"""Drafting with the MTP assistant: k sequential one-token steps on the target's KV (spec 4.6).

Between rounds a sequence's state is one vector: the target's hidden state of its last committed row, the row that
chose its newest token. The drafter has no KV, so there is nothing to roll back.

Shape legend: D sequences that draft, A sequences of the cycle and the null slot, N slots, H the target's hidden size,
V local vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gemray_kernels.sequence_tables import QueryLayout
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
        """Draft one token after the other for all sequences alike; drafts beyond a sequence's own number are never
        read."""
        queries = slots.row_kernels.query_rows(
            rows.cut_5A,
            slots.tables,
            slots.pages(slots.groups),
            num_drafting=rows.shape.num_drafting,
            num_drafts=rows.shape.max_drafts,
            delta=self._position_delta,
        )
        batch = _forward_batch(queries, slots.groups)
        token_D, state_DH = queries.token_ids_D, self._state_NH[queries.slot_D]
        rope = self._assistant.angles(batch.positions_T)
        for position_D in queries.draft_position_KD:
            logits_DV, state_DH = self._assistant.step(self._embedding(token_D), state_DH, rope, batch, self._caches)
            token_D = self._chooser.choose(
                logits_DV, queries.slot_D, position_D, slots.sampling, rows.plan.features, self._assistant.softcap
            )
            token_D = slots.row_kernels.write_drafts(token_D, queries.slot_D, position_D, slots.tables)

    def commit(
        self, rows: CycleRows, packed: PackedRows, slots: SlotTable, output: ForwardOutput, accepted_A: Tensor
    ) -> None:
        """Keep the hidden state of each sequence's last committed row."""
        if not len(output.hidden_UH):
            return  # prompt chunks alone, none of which chooses a token: a later one writes the state
        outputs = packed.outputs
        slots.row_kernels.keep_last_rows(
            output.hidden_UH, outputs.cut_5A, outputs.layout.first_A, accepted_A, self._state_NH
        )

    def reset(self, slot: int) -> None:
        """The state is written by the chunk that chooses a sequence's next token, before it is ever read."""


def _forward_batch(queries: QueryLayout, groups: Sequence[str]) -> ForwardBatch:
    """One query a sequence that sees the committed keys and no more; the same for all steps of a round."""
    return ForwardBatch(
        token_ids_T=queries.token_ids_D,  # unused: the assistant is given embeddings
        positions_T=queries.positions_D,
        query_start_Z=queries.query_start_Z,
        kv_len_S=queries.kv_len_D,
        groups={
            group: GroupMetadata(table_DP, queries.nothing_written_D)
            for group, table_DP in zip(groups, queries.block_tables, strict=True)
        },
        most_rows=1,
    )
