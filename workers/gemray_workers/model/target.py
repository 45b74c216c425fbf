"""The target model: the text decoder of a Gemma 4 checkpoint, one rank's shard of it (spec section 1).

Shape legend: T rows, H hidden size, L layers, P width of a per-layer embedding, F captured layers, R rows to score,
V local vocabulary rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.reference.paged_attention import paged_attention
from gemray_workers.checkpoint.target import WeightTarget, bytes_held
from gemray_workers.checkpoint.vocabulary import HEAD_WEIGHT
from gemray_workers.kv.cache import KVCaches
from gemray_workers.model.attention import AttentionKernel
from gemray_workers.model.batch import ForwardBatch, ForwardOutput
from gemray_workers.model.config import ModelConfig
from gemray_workers.model.decoder_layer import DecoderLayer
from gemray_workers.model.kv_groups import check_tensor_parallel
from gemray_workers.model.moe import OnExperts
from gemray_workers.model.norm import RMSNorm
from gemray_workers.model.per_layer_embedding import PerLayerEmbedding
from gemray_workers.model.rope import RotaryEmbeddings
from gemray_workers.model.vocab_parallel import VocabParallelEmbedding, VocabParallelHead, head_table
from gemray_workers.model.weight_sharding import WeightSharding
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.shard_indices import ShardIndices

# Towers and embedders of other modalities, beside the text decoder in multimodal checkpoints (spec 0.4).
_OTHER_MODALITIES = (
    "model.vision_tower.",
    "model.embed_vision.",
    "model.vision_embedder.",
    "model.audio_tower.",
    "model.embed_audio.",
)
_DEAD_ON_KV_SHARED_LAYERS = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")


class TargetModel:
    """The model's arithmetic and weights; it keeps nothing of requests."""

    def __init__(
        self,
        config: ModelConfig,
        comm: Communicator,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionKernel = paged_attention,
    ) -> None:
        """A model with unset weights, for a loader to fill through `weight_targets`.

        Raises:
            InvalidField: the ranks of `comm` do not divide the model.
        """
        check_tensor_parallel(config, comm.size)
        self.config = config
        self.dtype = dtype
        self.device = device
        self.shard = ShardIndices.of_rank(
            comm.rank, comm.size, org_vocab_size=config.org_vocab_size, num_added=config.num_added
        )
        sharding = WeightSharding(comm.rank, comm.size, dtype, device, config.quantization)
        self.embedding = VocabParallelEmbedding(
            "embed_tokens", self.shard, config.hidden_size, comm, sharding, scale=config.hidden_size**0.5
        )
        self._per_layer_embedding = (
            None
            if config.per_layer_embedding is None
            else PerLayerEmbedding(config, config.per_layer_embedding, comm, sharding)
        )
        self._rope = RotaryEmbeddings(config.layers, sharding.kernels, device)
        self._layers = [DecoderLayer(config, layer, comm, sharding, attention) for layer in config.layers]
        self._norm = RMSNorm("norm", config.hidden_size, config.rms_norm_eps, sharding)
        self.head_table = head_table(self.embedding, self.shard, sharding, is_own=config.has_own_head)
        self._head = VocabParallelHead(self.head_table, self.shard, config.final_logit_softcapping)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Scaled token embeddings [T, H], as the first layer (and a drafter) reads them. Communicates."""
        return self.embedding(token_ids_T)

    def forward(self, batch: ForwardBatch, kv: KVCaches, capture: tuple[int, ...] = ()) -> ForwardOutput:
        """Run every layer on the batch's rows, writing their keys and values into `kv`.

        Args:
            batch: the rows.
            kv: the caches that the batch's groups address.
            capture: layers whose output to keep, in the order of the result.
        """
        x_TH = self.embed(batch.token_ids_T)
        inputs_TLP = None if self._per_layer_embedding is None else self._per_layer_embedding(batch.token_ids_T, x_TH)
        rope = self._rope.cos_sin(batch.positions_T, self.dtype)
        captured: dict[int, Tensor] = {}
        normed_TH = self._layers[0].input_norm(x_TH)
        next_norms = [*(layer.input_norm.norm for layer in self._layers[1:]), self._norm.norm]
        for config, layer, next_norm in zip(self.config.layers, self._layers, next_norms, strict=True):
            input_TP = None if inputs_TLP is None else inputs_TLP[:, config.index]
            x_TH, normed_TH = layer(x_TH, normed_TH, rope[config.kind], input_TP, batch, kv, next_norm)
            if config.index in capture:
                captured[config.index] = x_TH
        return ForwardOutput(
            hidden_TH=normed_TH,
            captured_TFH=torch.stack([captured[index] for index in capture], dim=1) if capture else None,
        )

    def watch_experts(self, on_experts: OnExperts | None) -> None:
        """Tell `on_experts` of every layer's choices from now on, in the layers' order; None ends it.

        A captured graph tells nothing: watch cycles that run kernel by kernel.
        """
        for layer in self._layers:
            if layer.router is not None:
                layer.router.on_experts = on_experts

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """This rank's logits [R, V] in the compute dtype, soft-capped. Column c is id ``shard.global_ids()[c]``;
        padding columns are -inf."""
        return self._head(hidden_RH)

    @property
    def softcap(self) -> float | None:
        """What `uncapped_logits` lack."""
        return self._head.softcap

    def uncapped_logits(self, hidden_RH: Tensor) -> Tensor:
        """The same before the soft-cap, see `VocabParallelHead.uncapped`."""
        return self._head.uncapped(hidden_RH)

    def capped(self, uncapped_RV: Tensor) -> Tensor:
        """Logits from `uncapped_logits`."""
        return self._head.capped(uncapped_RV)

    def weight_targets(self) -> list[WeightTarget]:
        """Every tensor that the checkpoint must hold below ``config.weight_prefix``, and this rank's part of it."""
        tied = None if self.config.has_own_head else HEAD_WEIGHT
        targets = self.embedding.weight_targets(self.config.vocab_size, stand_in=tied)
        if self.config.has_own_head:
            targets += self.head_table.weight_targets(self.config.vocab_size)
        if self._per_layer_embedding is not None:
            targets += self._per_layer_embedding.weight_targets()
        for layer in self._layers:
            targets += layer.weight_targets()
        return targets + self._norm.weight_targets()

    def ignored_name(self, name: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name (the full one, as on disk) that nothing reads:
        other modalities, a head that equals the embedding, scales that change nothing, and the KV projections of layers
        that read a donor's KV."""
        if (name == HEAD_WEIGHT and not self.config.has_own_head) or name.startswith(_OTHER_MODALITIES):
            return True
        if self.config.quantization is not None and self.config.quantization.leaves_unread(name):
            return True
        return any(
            name.startswith(f"{self.config.weight_prefix}layers.{layer.index}.self_attn.{part}")
            for layer in self.config.layers
            if layer.kv_donor is not None
            for part in _DEAD_ON_KV_SHARED_LAYERS
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights, vocabulary padding included."""
        return bytes_held(self.weight_targets())
