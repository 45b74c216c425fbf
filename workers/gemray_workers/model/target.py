"""The target model: the text decoder of a Gemma 4 checkpoint, one rank's shard of it (spec section 1).

Shape legend: T rows, U of them whose output is used, H hidden size, L layers, P width of a per-layer embedding, F
captured layers, R rows to score, V local vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gemray_kernels.numerics import Numerics
from gemray_kernels.reference.paged_attention import paged_attention
from gemray_workers.checkpoint.target import WeightTarget, bytes_held
from gemray_workers.checkpoint.vocabulary import HEAD_WEIGHT
from gemray_workers.kv.cache import KVCaches
from gemray_workers.model.attention import AttentionKernel
from gemray_workers.model.batch import ForwardBatch, ForwardOutput, OutputRows
from gemray_workers.model.config import LayerKind, ModelConfig
from gemray_workers.model.decoder_layer import DecoderLayer
from gemray_workers.model.kv_groups import check_tensor_parallel
from gemray_workers.model.moe import OnExperts
from gemray_workers.model.norm import RMSNorm
from gemray_workers.model.per_layer_embedding import PerLayerEmbedding
from gemray_workers.model.rope import CosSin, RotaryEmbeddings
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


@dataclass(frozen=True)
class _Stage:
    """What some layers read beside the stream, for the rows that they run on."""

    batch: ForwardBatch
    rope: Mapping[LayerKind, CosSin]
    first_layer: int
    inputs_TLP: Tensor | None
    """Per-layer embeddings of the layers from the first on, in models that have them."""

    def input_of(self, index: int) -> Tensor | None:
        """The embeddings [T, P] of layer `index`."""
        return None if self.inputs_TLP is None else self.inputs_TLP[:, index - self.first_layer]


def first_narrowed(config: ModelConfig, capture: tuple[int, ...] = ()) -> int:
    """The layer in or before which rows without outputs end, where layers are captured; the number of layers where they
    end nowhere. If it owns KV, it writes their keys first."""
    last_owner = max(layer.index for layer in config.layers if layer.kv_donor is None)
    return max(last_owner, 1 + max(capture, default=-1))


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
        numerics: Numerics = Numerics.FAST,
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
        sharding = WeightSharding(comm.rank, comm.size, dtype, device, config.quantization, numerics)
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
        self._passed_over: frozenset[int] = frozenset()
        self._norm = RMSNorm("norm", config.hidden_size, config.rms_norm_eps, sharding)
        self.head_table = head_table(self.embedding, self.shard, sharding, is_own=config.has_own_head)
        self._head = VocabParallelHead(self.head_table, self.shard, config.final_logit_softcapping)

    def forward(
        self,
        batch: ForwardBatch,
        kv: KVCaches,
        capture: tuple[int, ...] = (),
        outputs: OutputRows | None = None,
    ) -> ForwardOutput:
        """Run every layer on the batch's rows, writing their keys and values into `kv`.

        Args:
            batch: the rows.
            kv: the caches that the batch's groups address.
            capture: layers whose output of all rows to keep, in the order of the result.
            outputs: the rows whose hidden states are wanted; None for all. The others end once the last layer that
                owns KV has written their keys, or behind the last captured layer (spec 1.11).
        """
        embedded_TH = self.embedding(batch.token_ids_T)
        split = len(self._layers) if outputs is None else first_narrowed(self.config, capture)
        stage = self._stage(batch, embedded_TH, range(split))
        x_TH, normed_TH = embedded_TH, self._layers[0].input_norm(embedded_TH)
        captured: dict[int, Tensor] = {}
        for index in range(split):
            x_TH, normed_TH = self._run(index, x_TH, normed_TH, stage, kv)
            if index in capture:
                captured[index] = x_TH
        if outputs is not None:
            normed_TH = self._finish(split, x_TH, normed_TH, embedded_TH, stage, outputs, kv)
        return ForwardOutput(
            hidden_UH=normed_TH,
            captured_TFH=torch.stack([captured[index] for index in capture], dim=1) if capture else None,
        )

    def _stage(self, batch: ForwardBatch, embedded_TH: Tensor, layers: range) -> _Stage:
        embedding = self._per_layer_embedding
        return _Stage(
            batch=batch,
            rope=self._rope.cos_sin(batch.positions_T, self.dtype),
            first_layer=layers.start,
            inputs_TLP=embedding(batch.token_ids_T, embedded_TH, layers) if embedding is not None and layers else None,
        )

    def _run(
        self,
        index: int,
        x_TH: Tensor,
        normed_TH: Tensor,
        stage: _Stage,
        kv: KVCaches,
        outputs: OutputRows | None = None,
        input_UP: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One layer of all rows of a stage, or of those with outputs alone; then `input_UP` is theirs."""
        if index in self._passed_over:
            return x_TH, normed_TH
        layer, kind = self._layers[index], self.config.layers[index].kind
        input_TP = stage.input_of(index) if outputs is None else input_UP
        is_last = index + 1 == len(self._layers)
        next_norm = (self._norm if is_last else self._layers[index + 1].input_norm).norm
        return layer(x_TH, normed_TH, stage.rope[kind], input_TP, stage.batch, kv, next_norm, outputs)

    def _finish(
        self,
        split: int,
        x_TH: Tensor,
        normed_TH: Tensor,
        embedded_TH: Tensor,
        stage: _Stage,
        outputs: OutputRows,
        kv: KVCaches,
    ) -> Tensor:
        """The hidden states [U, H] of the rows with outputs, by the layers from `split` on."""
        place_U, num_layers = outputs.place_U, len(self._layers)
        if split == num_layers:
            return normed_TH[place_U]
        config = self.config.layers[split]
        owns_kv = config.kv_donor is None
        if not len(place_U):
            if owns_kv:
                self._layers[split].write_kv(normed_TH, stage.rope[config.kind], stage.batch, kv)
            return normed_TH[:0]
        narrow = self._stage(outputs.batch, embedded_TH[place_U], range(split, num_layers))
        if owns_kv:
            x_UH, normed_UH = self._run(split, x_TH, normed_TH, stage, kv, outputs, narrow.input_of(split))
        else:
            x_UH, normed_UH = self._run(split, x_TH[place_U], normed_TH[place_U], narrow, kv)
        for index in range(split + 1, num_layers):
            x_UH, normed_UH = self._run(index, x_UH, normed_UH, narrow, kv)
        return normed_UH

    @contextmanager
    def one_layer_a_kind(self, capture: tuple[int, ...] = ()) -> Iterator[None]:
        """Pass over layers that launch what another layer does, meanwhile: for rehearsals, whose numbers nobody reads.

        Args:
            capture: as of `forward`.
        """
        split, num_layers = first_narrowed(self.config, capture), len(self._layers)
        kept = {split}
        for rows in (range(split), range(split + 1, num_layers)):
            first: dict[object, int] = {}
            for index in rows:
                first.setdefault(self._kinds[index], index)
            kept |= set(first.values())
        self._passed_over = frozenset(range(num_layers)) - kept
        try:
            yield
        finally:
            self._passed_over = frozenset()

    @cached_property
    def _kinds(self) -> list[object]:
        """What tells layers apart: equal for those that launch the same programs on the same rows. Found once, as a
        layer of packed experts has hundreds of weights."""
        return [self._kind_of(index) for index in range(len(self._layers))]

    def _kind_of(self, index: int) -> object:
        config, weights = self.config.layers[index], self._layers[index].weight_targets()
        reads = None if config.kv_donor is None else 0
        forms = tuple((t.name.replace(f"layers.{index}.", ""), tuple(t.shape)) for t in weights)
        return replace(config, index=0, kv_donor=reads), forms

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

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights, vocabulary padding included."""
        return bytes_held(self.weight_targets())
