"""The assistant's two heads: dense, and centroid-masked over an ordered vocabulary (spec 4.5).

Shape legend: S sequences, D the drafter's hidden size, V local vocabulary rows, C clusters, M tokens a cluster,
N = top_k · M scored tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gemray_kernels.precision import compute_dtype
from gemray_workers.checkpoint.target import Copy, WeightTarget
from gemray_workers.drafters.mtp.config import AssistantConfig, CentroidConfig
from gemray_workers.model.linear import ReplicatedLinear
from gemray_workers.model.vocab_parallel import VocabParallelHead, VocabParallelTable
from gemray_workers.model.weight_sharding import WeightSharding
from gemray_workers.parallel.shard_indices import ShardIndices


class Head(Protocol):
    """From normed hidden states to this rank's logits."""

    softcap: float | None
    """What the logits still lack."""

    def __call__(self, hidden_SD: Tensor) -> Tensor:
        """Logits [S, V] in the compute dtype, see `VocabParallelHead.uncapped`; tokens not scored have -inf."""
        ...

    def weight_targets(self) -> list[WeightTarget]:
        """Tensors of the head beside the table."""
        ...


def assistant_head(
    config: AssistantConfig, table: VocabParallelTable, shard: ShardIndices, sharding: WeightSharding
) -> Head:
    """The head that the assistant's config asks for, on its own table."""
    if config.centroids is None:
        return DenseHead(table, shard, config.decoder.final_logit_softcapping)
    return CentroidHead(table, shard, config.centroids, config.decoder.hidden_size, config.decoder.vocab_size, sharding)


class DenseHead:
    """Every token is scored."""

    def __init__(self, table: VocabParallelTable, shard: ShardIndices, softcap: float | None) -> None:
        self.softcap = softcap
        self._head = VocabParallelHead(table, shard, softcap)

    def __call__(self, hidden_SD: Tensor) -> Tensor:
        """Logits [S, V]."""
        return self._head.uncapped(hidden_SD)

    def weight_targets(self) -> list[WeightTarget]:
        """None: the table is all there is."""
        return []


class CentroidHead:
    """Tokens of the `top_k` best clusters are scored, each rank those of its own vocabulary rows.

    The clusters are chosen from replicated centroids, so every rank scores the same ones.
    """

    softcap: float | None = None

    def __init__(
        self,
        table: VocabParallelTable,
        shard: ShardIndices,
        config: CentroidConfig,
        width: int,
        vocab_size: int,
        sharding: WeightSharding,
    ) -> None:
        self._table_VD = table.table_VH
        self._shard = shard
        self._top_k = config.top_k
        self._centroids = ReplicatedLinear("masked_embedding.centroids", width, config.num_centroids, sharding)
        # Token id of each place in the ordered vocabulary, cluster by cluster.
        self._ordering = torch.zeros(vocab_size, dtype=torch.int64, device=sharding.device)
        self._ordering_CM = self._ordering.view(config.num_centroids, -1)

    def __call__(self, hidden_SD: Tensor) -> Tensor:
        """Logits [S, V]."""
        wide = compute_dtype(hidden_SD.dtype)
        best_SK = self._centroids(hidden_SD).topk(self._top_k, dim=-1).indices
        rows_SN, is_here_SN = self._shard.local_rows(self._ordering_CM[best_SK].flatten(1))
        scored_SN = torch.einsum("snd,sd->sn", self._table_VD[rows_SN].to(wide), hidden_SD.to(wide))
        logits_SV = torch.full(
            (len(hidden_SD), self._table_VD.shape[0] + 1), -torch.inf, dtype=wide, device=hidden_SD.device
        )
        # Tokens of other ranks go to a spare last column, which is cut off.
        column_SN = rows_SN.masked_fill(~is_here_SN, logits_SV.shape[1] - 1)
        return logits_SV.scatter_(1, column_SN, scored_SN)[:, :-1]

    def weight_targets(self) -> list[WeightTarget]:
        """Centroids and the ordering, whole on every rank."""
        size = len(self._ordering)
        ordering = WeightTarget("masked_embedding.token_ordering", (size,), (Copy((slice(0, size),), self._ordering),))
        return [*self._centroids.weight_targets(), ordering]
