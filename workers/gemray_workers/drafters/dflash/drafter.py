"""Drafting with DFlash: one pass over a block of masked tokens a round (spec 5.6).

The drafter's KV holds context alone, one row a committed position. A block's own keys lie behind it only while the
block is drafted; the context rows of the tokens that verification accepts overwrite them.

Shape legend: T rows, A sequences of the cycle and the null slot, R drafts, G KV groups, H
hidden size, V local vocabulary rows.
"""

from __future__ import annotations

from torch import Tensor

from gemray_workers.checkpoint.target import bytes_held
from gemray_workers.drafters.dflash.model import DFlashModel
from gemray_workers.drafters.draft_choice import DraftChooser
from gemray_workers.execution.cycle_rows import CycleRows, PackedRows
from gemray_workers.execution.slots import SlotTable
from gemray_workers.kv.cache import KVCaches
from gemray_workers.model.batch import ForwardOutput
from gemray_workers.model.vocab_parallel import VocabParallelEmbedding, VocabParallelHead, VocabParallelTable
from gemray_workers.parallel.shard_indices import ShardIndices


class DFlashDrafter:
    """The block drafter inside the target's ranks."""

    def __init__(
        self,
        model: DFlashModel,
        embedding: VocabParallelEmbedding,
        head_table: VocabParallelTable,
        shard: ShardIndices,
        caches: KVCaches,
        chooser: DraftChooser,
    ) -> None:
        """A drafter over its own `caches`; the target lends its embedding and its head."""
        config = model.config
        self._model = model
        self._embedding = embedding
        self._input_scale = self._embedding.scale if config.input_scale is None else config.input_scale
        self._head = VocabParallelHead(head_table, shard, config.final_logit_softcapping)
        self._caches = caches
        self._groups = tuple(dict.fromkeys(caches.group_of(layer.index) for layer in config.layers))
        self._chooser = chooser

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's shard."""
        return bytes_held(self._model.weight_targets())

    def propose(self, rows: CycleRows, slots: SlotTable) -> None:
        """Denoise a block a sequence: its newest token, then one mask for each draft."""
        packed = rows.blocks(slots, self._groups, self._model.config.mask_token_id)
        layout = packed.layout
        embedded_TH = self._embedding(layout.token_ids_T, self._input_scale)
        hidden_TH = self._model.denoise(embedded_TH, packed.forward, self._caches)

        # A rectangle of drafts: behind a sequence's own it reads rows of others and writes what is never read.
        slot_R, position_R = layout.slot_RQ.flatten(), layout.position_RQ.flatten()
        logits_RV = self._head.uncapped(hidden_TH[layout.row_RQ.flatten()])
        ids_R = self._chooser.choose(
            logits_RV, slot_R, position_R, slots.sampling, rows.plan.features, self._head.softcap
        )
        slots.row_kernels.write_drafts(ids_R, slot_R, position_R, slots.tables)

    def commit(
        self, rows: CycleRows, packed: PackedRows, slots: SlotTable, output: ForwardOutput, accepted_A: Tensor
    ) -> None:
        """Append the context of committed rows; rejected rows go to the null page, which nothing reads."""
        if output.captured_TFH is None:
            raise RuntimeError("the target's forward pass captured no features")
        layout = packed.layout
        places_GT = slots.row_kernels.committed_places(
            layout.kv_index_GT, layout.sequence_T, layout.offset_T, rows.cut_5A, accepted_A
        )
        kv_indices = dict(zip(slots.groups, places_GT.unbind(), strict=True))
        self._model.inject(output.captured_TFH, packed.forward.positions_T, kv_indices, self._caches)

    def reset(self, slot: int) -> None:
        """Context lies in pages, which come and go with the block tables."""
