"""One decoder layer (spec 1.3).

Shape legend: T rows, U of them whose output is used, H hidden size, S summands, K experts a row, P width of a per-layer
embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gemray_kernels.reference.layer_norms import Norm
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.kv.cache import KVCaches
from gemray_workers.model.attention import Attention, AttentionKernel
from gemray_workers.model.batch import ForwardBatch, OutputRows
from gemray_workers.model.config import LayerConfig, ModelConfig
from gemray_workers.model.mlp import MLP
from gemray_workers.model.moe import Experts, Router
from gemray_workers.model.norm import RMSNorm
from gemray_workers.model.per_layer_embedding import PerLayerBranch
from gemray_workers.model.rope import CosSin
from gemray_workers.model.weight_sharding import WeightSharding, whole_tensor
from gemray_workers.parallel.communicator import Communicator


class DecoderLayer:
    """Attention and feed-forward, each between two norms; optionally a per-layer embedding; then one scalar."""

    def __init__(
        self,
        model: ModelConfig,
        layer: LayerConfig,
        comm: Communicator,
        sharding: WeightSharding,
        kernel: AttentionKernel,
        *,
        layers_name: str = "layers",
    ) -> None:
        prefix = f"{layers_name}.{layer.index}"

        def norm(name: str) -> RMSNorm:
            return RMSNorm(f"{prefix}.{name}", model.hidden_size, model.rms_norm_eps, sharding)

        self._prefix = prefix
        self._kernels = sharding.kernels
        self.input_norm = norm("input_layernorm")
        self._attention = Attention(f"{prefix}.self_attn", model, layer, comm, sharding, kernel)
        self._post_attention_norm = norm("post_attention_layernorm")
        self._pre_feedforward_norm = norm("pre_feedforward_layernorm")
        self._mlp = MLP(f"{prefix}.mlp", model.hidden_size, layer.intermediate_size, comm, sharding)
        self._moe = None if model.moe is None else _ExpertBranch(prefix, model, comm, sharding)
        self._post_feedforward_norm = norm("post_feedforward_layernorm")
        self._per_layer = (
            None
            if model.per_layer_embedding is None
            else PerLayerBranch(prefix, model, model.per_layer_embedding, sharding)
        )
        self._scalar = sharding.empty(1)

    @property
    def router(self) -> Router | None:
        """What chooses experts, in a layer that has any."""
        return None if self._moe is None else self._moe.router

    def __call__(
        self,
        x_TH: Tensor,
        normed_TH: Tensor,
        rope: CosSin,
        per_layer_input_TP: Tensor | None,
        batch: ForwardBatch,
        kv: KVCaches,
        next_norm: Norm,
        outputs: OutputRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after this layer and its next norm, both [T, H], or [U, H] of some rows.

        Args:
            x_TH: the stream before it.
            normed_TH: this layer's `input_norm` of it.
            rope: angles for this layer's type.
            per_layer_input_TP: this layer's embeddings, in models that have them.
            batch: whose rows these are.
            kv: the caches.
            next_norm: of the next layer, or the model's last.
            outputs: the rows that go on once the keys of all are written, with `per_layer_input_TP` for these alone;
                None for all.
        """
        attended_STH = self._attention(normed_TH, rope, batch, kv, outputs)
        if outputs is not None:
            x_TH = x_TH[outputs.place_U]
        norms = [self._pre_feedforward_norm.norm, *(() if self._moe is None else self._moe.norms)]
        x_TH, *normed = self._kernels.add_then_norms(
            x_TH,
            attended_STH,
            self._post_attention_norm.norm,
            None,
            norms,
            lets_at_once=self._mlp.starts_at_once(len(x_TH)),
        )
        # The next layer's first product is as this one's, nearly always; of others nothing is lost but time.
        post_norm, next_at_once = self._post_feedforward_norm.norm, self._attention.starts_at_once(len(x_TH))
        if self._moe is not None:
            return self._moe(x_TH, normed, self._mlp, post_norm, self._scalar, next_norm, next_at_once=next_at_once)
        (normed_TH,) = normed
        output_STH = self._mlp(normed_TH)
        if self._per_layer is None or per_layer_input_TP is None:
            x_TH, normed_TH = self._kernels.add_then_norms(
                x_TH, output_STH, post_norm, self._scalar, [next_norm], lets_at_once=next_at_once
            )
            return x_TH, normed_TH
        (x_TH,) = self._kernels.add_then_norms(
            x_TH, output_STH, post_norm, None, [], lets_at_once=self._per_layer.starts_at_once(len(x_TH))
        )
        return self._per_layer(x_TH, per_layer_input_TP, self._scalar, next_norm, next_at_once=next_at_once)

    def write_kv(self, normed_TH: Tensor, rope: CosSin, batch: ForwardBatch, kv: KVCaches) -> None:
        """Write the rows' keys and values, and compute nothing else, in a layer that owns KV."""
        self._attention.queries(normed_TH, rope, batch, kv)

    def weight_targets(self) -> list[WeightTarget]:
        """Every tensor of this layer."""
        parts = (
            self.input_norm,
            self._attention,
            self._post_attention_norm,
            self._pre_feedforward_norm,
            self._mlp,
            self._moe,
            self._post_feedforward_norm,
            self._per_layer,
        )
        targets = [target for part in parts if part is not None for target in part.weight_targets()]
        return [*targets, whole_tensor(f"{self._prefix}.layer_scalar", self._scalar)]


class _ExpertBranch:
    """Routed experts beside the dense MLP: the router reads the stream itself, the experts their own norm of it."""

    def __init__(self, prefix: str, model: ModelConfig, comm: Communicator, sharding: WeightSharding) -> None:
        if model.moe is None:
            raise ValueError("a model without experts has no expert branch")

        def norm(name: str) -> RMSNorm:
            return RMSNorm(f"{prefix}.{name}", model.hidden_size, model.rms_norm_eps, sharding)

        self._kernels = sharding.kernels
        self.router = Router(f"{prefix}.router", model, model.moe, sharding)
        self._experts = Experts(f"{prefix}.experts", model.hidden_size, model.moe, comm, sharding)
        self._post_dense_norm = norm("post_feedforward_layernorm_1")
        self._pre_experts_norm = norm("pre_feedforward_layernorm_2")
        self._post_experts_norm = norm("post_feedforward_layernorm_2")

    @property
    def norms(self) -> tuple[Norm, Norm]:
        """Norms of the residual stream, for the router and for the experts."""
        return self.router.norm, self._pre_experts_norm.norm

    def __call__(
        self,
        x_TH: Tensor,
        normed: Sequence[Tensor],
        mlp: MLP,
        post_norm: Norm,
        scale: Tensor,
        next_norm: Norm,
        *,
        next_at_once: bool,
    ) -> tuple[Tensor, Tensor]:
        """The stream after the dense MLP and the experts, and its next norm, both [T, H].

        Args:
            x_TH: the stream before them.
            normed: its norms for the MLP, the router and the experts, [T, H] each.
            mlp: the dense MLP.
            post_norm: of the sum of both.
            scale: of the stream after them.
            next_norm: of the next layer, or the model's last.
            next_at_once: whether its reader may start at once (`Attention.starts_at_once`).
        """
        dense_input_TH, router_input_TH, experts_input_TH = normed
        # The router stands between the MLP and the experts, whose many programs would start beside the MLP's otherwise,
        # crowded where those are not (`benchmarks/results/2026-11-30-h200-columns`).
        dense_STH = mlp(dense_input_TH)
        weights_TK, experts_TK = self.router(router_input_TH)
        routed_TKH, weights_TK = self._experts(experts_input_TH, weights_TK, experts_TK)
        x_TH, normed_TH = self._kernels.add_experts_then_norms(
            x_TH,
            dense_STH,
            self._post_dense_norm.norm,
            routed_TKH,
            weights_TK,
            self._post_experts_norm.norm,
            post_norm,
            scale,
            [next_norm],
            lets_at_once=next_at_once,
        )
        return x_TH, normed_TH

    def weight_targets(self) -> list[WeightTarget]:
        """Router, experts and the three norms."""
        parts = (self.router, self._experts, self._post_dense_norm, self._pre_experts_norm, self._post_experts_norm)
        return [target for part in parts for target in part.weight_targets()]
