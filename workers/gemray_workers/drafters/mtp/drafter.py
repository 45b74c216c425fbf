"""Drafting with the MTP assistant: k sequential one-token steps on the target's KV (spec 4.6).

Between rounds a sequence's state is one vector: the target's hidden state of its last committed row, the row that
chose its newest token. The drafter has no KV, so there is nothing to roll back.

Shape legend: S sequences, N slots, H the target's hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gemray_workers.checkpoint.target import bytes_held
from gemray_workers.drafters.draft_choice import DraftChooser
from gemray_workers.drafters.mtp.assistant import AssistantModel
from gemray_workers.engine.host_copy import to_device
from gemray_workers.engine.slots import SlotTable
from gemray_workers.kv.cache import KVCaches
from gemray_workers.model.batch import ForwardBatch, ForwardOutput, GroupMetadata
from gemray_workers.model.vocab_parallel import VocabParallelEmbedding
from gemray_workers.scheduling.plan import ScheduledRows


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
        self._state_NH = embedding.table_VH.new_zeros(num_slots, assistant.config.backbone_hidden_size)

    @property
    def weight_bytes(self) -> int:
        """Of the assistant's shard."""
        return bytes_held(self._assistant.weight_targets())

    def propose(self, rows: Sequence[ScheduledRows], slots: SlotTable) -> None:
        """Draft one token after the other; sequences that want fewer drafts leave the batch earlier."""
        drafting = sorted((r for r in rows if r.num_drafts), key=lambda r: -r.num_drafts)
        if not drafting:
            return
        slot_S = to_device([r.slot for r in drafting], slots.device)
        committed_S = slots.computed_N[slot_S]
        token_S = slots.token_ids_NL[slot_S, committed_S]
        state_SH = self._state_NH[slot_S]
        for i in range(drafting[0].num_drafts):
            active = [r for r in drafting if r.num_drafts > i]
            n = len(active)
            batch = self._one_query_each(slot_S[:n], committed_S[:n], slots)
            logits_SV, state_SH = self._assistant.step(self._embedding(token_S[:n]), state_SH[:n], batch, self._caches)
            position_S = committed_S[:n] + 1 + i
            token_S = self._chooser.choose(logits_SV, slot_S[:n], position_S, slots)
            slots.token_ids_NL[slot_S[:n], position_S] = token_S

    def commit(
        self,
        rows: Sequence[ScheduledRows],
        slots: SlotTable,
        batch: ForwardBatch,
        output: ForwardOutput,
        num_accepted: Sequence[int],
    ) -> None:
        """Keep the hidden state of each sequence's last committed row."""
        counts = [(r.num_known, r.num_drafts, n) for r, n in zip(rows, num_accepted, strict=True)]
        slot_S = to_device([r.slot for r in rows], self._state_NH.device)
        self._state_NH[slot_S] = output.hidden_TH[_committed_rows(counts, output.hidden_TH.device)]

    def reset(self, slot: int) -> None:
        """The state is written by the first chunk of a new sequence, before it is ever read."""

    def _one_query_each(self, slot_S: Tensor, committed_S: Tensor, slots: SlotTable) -> ForwardBatch:
        """One query a sequence that sees the committed keys and no more; the same for all steps of a round."""
        nothing_written_S = torch.zeros_like(slot_S)
        groups: Mapping[str, GroupMetadata] = {
            name: GroupMetadata(table_NP[slot_S], nothing_written_S) for name, table_NP in slots.block_tables_NP.items()
        }
        return ForwardBatch(
            token_ids_T=slot_S,  # unused: the assistant is given embeddings
            positions_T=committed_S + self._position_delta,
            query_start_S1=torch.arange(len(slot_S) + 1, dtype=torch.int32, device=slot_S.device),
            kv_len_S=committed_S.to(torch.int32),
            groups=groups,
        )


def _committed_rows(num_rows: list[tuple[int, int, int]], device: torch.device) -> Tensor:
    """Indices into T of each sequence's last committed row, from its (known, drafted, accepted) counts."""
    indices, begin = [], 0
    for num_known, num_drafts, num_accepted in num_rows:
        indices.append(begin + num_known + num_accepted - 1)
        begin += num_known + num_drafts
    return to_device(indices, device)
