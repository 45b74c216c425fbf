"""Embedding tables whose rows are split over the ranks by `ShardIndices` (spec 1.1, 1.10 and 6.2).

Shape legend: T rows, H width, R rows to score, V local vocabulary rows, S summands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.numerics import leaves_of
from gemray_kernels.precision import compute_dtype
from gemray_kernels.reference.layer_norms import total
from gemray_workers.checkpoint.target import Copy, WeightTarget
from gemray_workers.checkpoint.vocabulary import HEAD
from gemray_workers.model.plain_products import plain_products
from gemray_workers.model.weight_sharding import WeightSharding
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.shard_indices import ShardIndices, columns_of


class VocabParallelTable:
    """Rows of a table, one an id, of which each rank holds some."""

    def __init__(
        self, name: str, shard: ShardIndices, width: int, sharding: WeightSharding, *, at_root: bool = False
    ) -> None:
        self._name = name
        self._at_root = at_root
        self._shard = shard
        self.kernels = sharding.kernels
        self.leaves = leaves_of(shard.num_elements_padded * sharding.size, width)
        """Leaves of the table's product in exact numerics."""
        self.table_VH = sharding.empty(shard.num_elements_padded, width).zero_()  # padding rows stay zero

    def weight_targets(self, num_ids: int, *, stand_in: str | None = None) -> list[WeightTarget]:
        """The table, `num_ids` rows on disk: this rank's original ids, then its added ones. `stand_in` is the full name
        of a table tied to it."""
        shard, width = self._shard, self.table_VH.shape[1]
        regions = (
            (shard.org_vocab_start_index, shard.num_org_elements, 0),
            (shard.added_vocab_start_index, shard.num_added_elements, shard.num_org_elements_padded),
        )
        copies = tuple(
            Copy((slice(first, first + count), slice(0, width)), self.table_VH[row : row + count])
            for first, count, row in regions
            if count
        )
        return [
            WeightTarget(f"{self._name}.weight", (num_ids, width), copies, at_root=self._at_root, stand_in=stand_in)
        ]


class VocabParallelEmbedding(VocabParallelTable):
    """A scaled lookup: ``table[id] · scale``."""

    def __init__(
        self,
        name: str,
        shard: ShardIndices,
        width: int,
        comm: Communicator,
        sharding: WeightSharding,
        *,
        scale: float,
        vocab_size: int | None = None,
    ) -> None:
        """Place an empty table; ids outside ``0 <= id < vocab_size``, if it is stated, are looked up as 0."""
        super().__init__(name, shard, width, sharding)
        self._comm = comm
        self._embed = sharding.kernels.embed
        self._columns = columns_of(shard, sharding.device)
        self._vocab_size = vocab_size
        self.scale = _rounded(scale, sharding.dtype)

    def __call__(self, token_ids_T: Tensor, scale: float | None = None, columns: slice = slice(None)) -> Tensor:
        """Scaled embeddings [T, H] on every rank, or those `columns` of them, by `scale` in the place of its own; ids
        that no rank holds give zeros."""
        scale = self.scale if scale is None else scale
        table_VH = self.table_VH[:, columns]
        # One rank at most contributes to each row, so the sum of what is rounded already is exact.
        return self._comm.all_reduce(self._embed(token_ids_T, table_VH, self._columns, scale, self._vocab_size))


def head_table(
    embedding: VocabParallelEmbedding, shard: ShardIndices, sharding: WeightSharding, *, is_own: bool
) -> VocabParallelTable:
    """What scores a model's tokens: a table of its own, which a checkpoint keeps at its root, or the embedding."""
    if not is_own:
        return embedding
    return VocabParallelTable(HEAD, shard, embedding.table_VH.shape[1], sharding, at_root=True)


class VocabParallelHead:
    """Logits from the rows of a table."""

    def __init__(self, table: VocabParallelTable, shard: ShardIndices, softcap: float | None) -> None:
        self._table_VH = table.table_VH
        self._wide_summands = plain_products(table.kernels, table.leaves).wide_summands
        self.softcap = softcap
        has_padding = shard.num_org_vocab_padding + shard.num_added_vocab_padding > 0
        self._is_padding_V = (shard.global_ids() < 0).to(self._table_VH.device) if has_padding else None

    def __call__(self, hidden_RH: Tensor) -> Tensor:
        """This rank's logits [R, V] in the compute dtype, soft-capped; padding columns are -inf."""
        logits_RV = self.uncapped(hidden_RH)
        if self.softcap is None:
            return logits_RV
        # In place: a MiB a row, of 128 rows and more, need not be there twice.
        return self._without_padding(logits_RV.div_(self.softcap).tanh_().mul_(self.softcap))

    def uncapped(self, hidden_RH: Tensor) -> Tensor:
        """Logits before the soft-cap, which the choice of tokens applies as it reads them. Padding columns are -inf
        where there is no soft-cap, and anything where one follows."""
        parts_SRV = self._wide_summands(hidden_RH, self._table_VH)
        logits_RV = total(parts_SRV, parts_SRV.dtype)
        return self._without_padding(logits_RV) if self.softcap is None else logits_RV

    def capped(self, uncapped_RV: Tensor) -> Tensor:
        """Logits from what `uncapped` gave."""
        if self.softcap is None:
            return uncapped_RV
        return self._without_padding((uncapped_RV / self.softcap).tanh_().mul_(self.softcap))

    def _without_padding(self, logits_RV: Tensor) -> Tensor:
        return logits_RV if self._is_padding_V is None else logits_RV.masked_fill(self._is_padding_V, -torch.inf)


def _rounded(scale: float, dtype: torch.dtype) -> float:
    """`scale` as weights of `dtype` hold it: bfloat16 turns sqrt(2816) = 53.066 into 53 (spec 1.1)."""
    return torch.tensor(scale, dtype=compute_dtype(dtype)).to(dtype).item()
