"""Per-layer embeddings: a second table that feeds a small vector into every layer (spec 1.8).

The table is the larger half of the small models (E4B: 2.8 of 7.5 billion parameters), so it is split over the ranks by
vocabulary like the first; one all-reduce a forward pass brings a batch's rows together. The two projections are small
and whole on every rank.

Shape legend: T rows, H hidden size, L layers, P width a layer.
"""

from __future__ import annotations

from torch import Tensor

from gemray_kernels.reference.layer_norms import Norm
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.model.config import ModelConfig, PerLayerEmbeddingConfig
from gemray_workers.model.linear import ReplicatedLinear
from gemray_workers.model.norm import RMSNorm
from gemray_workers.model.vocab_parallel import VocabParallelEmbedding
from gemray_workers.model.weight_sharding import WeightSharding
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.shard_indices import ShardIndices


class PerLayerEmbedding:
    """Computes the inputs of many layers at once, before the first of them."""

    def __init__(
        self, model: ModelConfig, config: PerLayerEmbeddingConfig, comm: Communicator, sharding: WeightSharding
    ) -> None:
        self._config = config
        self._per_layer_inputs = sharding.kernels.per_layer_inputs
        packed = model.num_layers * config.width
        shard = ShardIndices.of_rank(sharding.rank, sharding.size, org_vocab_size=config.vocab_size)
        self._table = VocabParallelEmbedding(
            "embed_tokens_per_layer",
            shard,
            packed,
            comm,
            sharding,
            scale=config.width**0.5,
            vocab_size=config.vocab_size,
        )
        self._projection = ReplicatedLinear("per_layer_model_projection", model.hidden_size, packed, sharding)
        self._projection_scale = model.hidden_size**-0.5
        self._norm = RMSNorm("per_layer_projection_norm", config.width, model.rms_norm_eps, sharding)

    def __call__(self, token_ids_T: Tensor, embeddings_TH: Tensor, layers: range) -> Tensor:
        """Inputs [T, L, P] of some layers.

        Args:
            token_ids_T: ids beyond the table use its row 0.
            embeddings_TH: the scaled token embeddings.
            layers: whose inputs, one behind the other; not empty.
        """
        width = self._config.width
        first, length = layers.start * width, len(layers) * width
        context_STO = self._projection.summands(embeddings_TH, first=first, length=length)
        tokens_TO = self._table(token_ids_T, columns=slice(first, first + length))
        return self._per_layer_inputs(context_STO, tokens_TO, self._norm.norm, self._projection_scale)

    def weight_targets(self) -> list[WeightTarget]:
        """Table, projection and its norm."""
        return (
            self._table.weight_targets(self._config.vocab_size)
            + self._projection.weight_targets()
            + self._norm.weight_targets()
        )


class PerLayerBranch:
    """Adds one layer's input to its residual stream."""

    def __init__(
        self, prefix: str, model: ModelConfig, config: PerLayerEmbeddingConfig, sharding: WeightSharding
    ) -> None:
        self._kernels = sharding.kernels
        self._gate = ReplicatedLinear(f"{prefix}.per_layer_input_gate", model.hidden_size, config.width, sharding)
        self._projection = ReplicatedLinear(f"{prefix}.per_layer_projection", config.width, model.hidden_size, sharding)
        self._norm = RMSNorm(f"{prefix}.post_per_layer_input_norm", model.hidden_size, model.rms_norm_eps, sharding)

    def __call__(
        self, x_TH: Tensor, input_TP: Tensor, scale: Tensor, next_norm: Norm, *, next_at_once: bool
    ) -> tuple[Tensor, Tensor]:
        """``x = (x + branch(x)) · scale`` and its next norm, both [T, H]."""
        projected_STH = self._projection.gated_summands(self._gate.summands(x_TH), input_TP)
        x_TH, normed_TH = self._kernels.add_then_norms(
            x_TH, projected_STH, self._norm.norm, scale, [next_norm], lets_at_once=next_at_once
        )
        return x_TH, normed_TH

    def starts_at_once(self, num_rows: int) -> bool:
        """Whether the kernel before is to let the first one of so many rows start at once."""
        return self._gate.starts_at_once(num_rows)

    def weight_targets(self) -> list[WeightTarget]:
        """Gate, projection and norm."""
        return self._gate.weight_targets() + self._projection.weight_targets() + self._norm.weight_targets()
