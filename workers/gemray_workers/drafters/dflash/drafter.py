"""Drafting with DFlash: one pass over a block of masked tokens a round (spec 5.6).

The drafter's KV holds context alone, one row a committed position. A block's own keys lie behind it only while the
block is drafted; the context rows of the tokens that verification accepts overwrite them.

Shape legend: T rows, R drafted rows, H hidden size, V local vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemray_workers.checkpoint.target import bytes_held
from gemray_workers.drafters.dflash.model import DFlashModel
from gemray_workers.drafters.draft_choice import DraftChooser
from gemray_workers.engine.host_copy import to_device
from gemray_workers.engine.rows import Span, lay_out
from gemray_workers.engine.slots import SlotTable
from gemray_workers.kv.cache import KVCaches
from gemray_workers.model.batch import ForwardBatch, ForwardOutput
from gemray_workers.model.vocab_parallel import VocabParallelEmbedding, VocabParallelHead
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.scheduling.plan import ScheduledRows


class DFlashDrafter:
    """The block drafter inside the target's ranks."""

    def __init__(
        self,
        model: DFlashModel,
        embedding: VocabParallelEmbedding,
        shard: ShardIndices,
        caches: KVCaches,
        chooser: DraftChooser,
    ) -> None:
        """A drafter over its own `caches`; the target lends its embedding, which is its head too."""
        config = model.config
        self._model = model
        self._embedding = embedding
        self._input_scale = self._embedding.scale if config.input_scale is None else config.input_scale
        self._head = VocabParallelHead(embedding, shard, config.final_logit_softcapping)
        self._caches = caches
        self._groups = tuple(dict.fromkeys(caches.group_of(layer.index) for layer in config.layers))
        self._chooser = chooser

    @property
    def weight_bytes(self) -> int:
        """Of the model's shard."""
        return bytes_held(self._model.weight_targets())

    def propose(self, rows: Sequence[ScheduledRows], slots: SlotTable) -> None:
        """Denoise a block a sequence: its newest token, then one mask for each draft wanted."""
        drafting = [r for r in rows if r.num_drafts]
        if not drafting:
            return
        batch = lay_out([Span(r.slot, 1 + r.num_drafts) for r in drafting], slots, self._groups)
        # Every row but the first of each block, named from the host: a mask would make it wait for the device.
        slots_R = [r.slot for r in drafting for _ in range(r.num_drafts)]
        places = list(zip(slots_R, _draft_rows(drafting), strict=True))
        slot_R, row_R = to_device(places, slots.device).unbind(1)
        tokens_T = batch.token_ids_T.index_fill(0, row_R, self._model.config.mask_token_id)
        hidden_TH = self._model.denoise(self._embedding.lookup(tokens_T) * self._input_scale, batch, self._caches)

        position_R = batch.positions_T[row_R]
        ids_R = self._chooser.choose(self._head(hidden_TH[row_R]), slot_R, position_R, slots)
        slots.token_ids_NL[slot_R, position_R] = ids_R

    def commit(
        self,
        rows: Sequence[ScheduledRows],
        slots: SlotTable,
        batch: ForwardBatch,
        output: ForwardOutput,
        num_accepted: Sequence[int],
    ) -> None:
        """Append the context of committed rows; rejected rows go to the null page, which nothing reads."""
        if output.captured_TFH is None:
            raise RuntimeError("the target's forward pass captured no features")
        is_committed_T = _committed(rows, num_accepted, batch.token_ids_T)
        slot_mappings = {
            name: batch.groups[name].slot_mapping_T.masked_fill(~is_committed_T, 0) for name in self._groups
        }
        self._model.inject(output.captured_TFH, batch.positions_T, slot_mappings, self._caches)

    def reset(self, slot: int) -> None:
        """Context lies in pages, which come and go with the block tables."""


def _draft_rows(drafting: Sequence[ScheduledRows]) -> list[int]:
    """Indices into the rows of all blocks of those that hold a mask."""
    rows: list[int] = []
    begin = 0
    for r in drafting:
        rows += range(begin + 1, begin + 1 + r.num_drafts)
        begin += 1 + r.num_drafts
    return rows


def _committed(rows: Sequence[ScheduledRows], num_accepted: Sequence[int], like_T: Tensor) -> Tensor:
    """Which rows of the step stand for good, bool [T]."""
    flags: list[bool] = []
    for r, n in zip(rows, num_accepted, strict=True):
        flags += [True] * (r.num_known + n) + [False] * (r.num_drafts - n)
    return to_device(flags, like_T.device, torch.bool)
