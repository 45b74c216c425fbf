"""The assistant's arithmetic and weights: one draft step for a batch of sequences (spec 4.2).

Shape legend: S sequences, H the target's hidden size, D the drafter's hidden size, V local vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gemray_kernels.reference.paged_attention import paged_attention
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.checkpoint.vocabulary import HEAD, HEAD_WEIGHT
from gemray_workers.drafters.mtp.config import EMBEDDING, EMBEDDING_WEIGHT, AssistantConfig
from gemray_workers.drafters.mtp.heads import assistant_head
from gemray_workers.kv.cache import KVCaches
from gemray_workers.model.attention import AttentionKernel
from gemray_workers.model.batch import ForwardBatch
from gemray_workers.model.config import LayerKind
from gemray_workers.model.decoder_layer import DecoderLayer
from gemray_workers.model.linear import ReplicatedLinear
from gemray_workers.model.norm import RMSNorm
from gemray_workers.model.rope import CosSin, RotaryEmbeddings
from gemray_workers.model.vocab_parallel import VocabParallelTable
from gemray_workers.model.weight_sharding import WeightSharding
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.shard_indices import ShardIndices


class AssistantModel:
    """Q-only decoder layers between two projections, heads sharded like the target's; it keeps nothing of requests.

    Layers, heads and the vocabulary are sharded as the target's are, so that each rank's draft heads read KV heads
    that it holds (spec 6.4). The projections are small and replicated: the recurrent state must be whole anyway.
    """

    def __init__(
        self,
        config: AssistantConfig,
        shard: ShardIndices,
        comm: Communicator,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionKernel = paged_attention,
    ) -> None:
        decoder = config.decoder
        sharding = WeightSharding(comm.rank, comm.size, dtype, device, decoder.quantization)
        self.config = config
        self._dtype = dtype
        self._pre_projection = ReplicatedLinear(
            "pre_projection", 2 * config.backbone_hidden_size, decoder.hidden_size, sharding
        )
        self._post_projection = ReplicatedLinear(
            "post_projection", decoder.hidden_size, config.backbone_hidden_size, sharding
        )
        self._rope = RotaryEmbeddings(decoder.layers, sharding.kernels, device)
        self._layers = [
            DecoderLayer(decoder, layer, comm, sharding, attention, layers_name="model.layers")
            for layer in decoder.layers
        ]
        self._norm = RMSNorm("model.norm", decoder.hidden_size, decoder.rms_norm_eps, sharding)
        # The drafter's own table is its head and never its input, which is the target's embedding: of two, one is read.
        name = HEAD if decoder.has_own_head else EMBEDDING
        self._table = VocabParallelTable(name, shard, decoder.hidden_size, sharding)
        self._head = assistant_head(config, self._table, shard, sharding)

    def angles(self, positions_S: Tensor) -> Mapping[LayerKind, CosSin]:
        """Position of each sequence's queries: a round's steps all stand at one position."""
        return self._rope.cos_sin(positions_S, self._dtype)

    def step(
        self,
        embedded_SH: Tensor,
        state_SH: Tensor,
        rope: Mapping[LayerKind, CosSin],
        batch: ForwardBatch,
        kv: KVCaches,
    ) -> tuple[Tensor, Tensor]:
        """Draft one token a sequence.

        Args:
            embedded_SH: the target's scaled embedding of each sequence's newest token, or of the last draft.
            state_SH: the target's post-norm hidden state that chose the newest token, then the drafter's own state.
            rope: `angles` of the batch's positions.
            batch: one query a sequence, over the committed keys alone.
            kv: the target's caches, which are only read.

        Returns:
            This rank's logits [S, V] in the compute dtype, before the soft-cap, and the next state [S, H].
        """
        x_SD = self._pre_projection(torch.cat([embedded_SH, state_SH], dim=-1))
        normed_SD = self._layers[0].input_norm(x_SD)
        next_norms = [*(layer.input_norm.norm for layer in self._layers[1:]), self._norm.norm]
        for config, layer, next_norm in zip(self.config.decoder.layers, self._layers, next_norms, strict=True):
            x_SD, normed_SD = layer(x_SD, normed_SD, rope[config.kind], None, batch, kv, next_norm)
        return self._head(normed_SD), self._post_projection(normed_SD)

    @property
    def softcap(self) -> float | None:
        """What the logits of `step` still lack."""
        return self._head.softcap

    def weight_targets(self) -> list[WeightTarget]:
        """Every tensor of an assistant checkpoint."""
        targets = self._pre_projection.weight_targets() + self._post_projection.weight_targets()
        decoder = self.config.decoder
        tied = None if decoder.has_own_head else HEAD_WEIGHT
        targets += self._table.weight_targets(decoder.vocab_size, stand_in=tied)
        for layer in self._layers:
            targets += layer.weight_targets()
        targets += self._norm.weight_targets()
        return targets + self._head.weight_targets()

    def ignored_name(self, name: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name that nothing reads: the table that is not the head, and
        scales that change nothing."""
        recipe = self.config.decoder.quantization
        return name in (HEAD_WEIGHT, EMBEDDING_WEIGHT) or (recipe is not None and recipe.leaves_unread(name))
