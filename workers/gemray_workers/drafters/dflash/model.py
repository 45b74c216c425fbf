"""The DFlash drafter's arithmetic and weights (spec 5.1 to 5.5).

Shape legend: T rows, F captured layers, H hidden size, R rows to score, V local vocabulary rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.reference.paged_attention import paged_attention
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.drafters.dflash.config import DFlashConfig
from gemray_workers.drafters.dflash.layer import DFlashLayer, ScaleNorm
from gemray_workers.kv.cache import KVCaches
from gemray_workers.model.attention import AttentionKernel
from gemray_workers.model.batch import ForwardBatch
from gemray_workers.model.linear import ReplicatedLinear
from gemray_workers.model.rope import RotaryEmbeddings
from gemray_workers.model.weight_sharding import WeightSharding
from gemray_workers.parallel.communicator import Communicator


class DFlashModel:
    """Denoises blocks over context keys that it made from the target's features; it keeps nothing of requests."""

    def __init__(
        self,
        config: DFlashConfig,
        comm: Communicator,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionKernel = paged_attention,
    ) -> None:
        sharding = WeightSharding(comm.rank, comm.size, dtype, device, config.quantization)
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self._dtype = dtype
        self._fc = ReplicatedLinear("fc", len(config.target_layer_ids) * hidden_size, hidden_size, sharding)
        self._hidden_norm = ScaleNorm("hidden_norm", hidden_size, eps, sharding)
        self._rope = RotaryEmbeddings(config.layers, sharding.kernels, device)
        self._layers = [DFlashLayer(config, layer.index, comm, sharding, attention) for layer in config.layers]
        self._norm = ScaleNorm("norm", hidden_size, eps, sharding)

    def inject(self, features_TFH: Tensor, positions_T: Tensor, kv_indices: dict[str, Tensor], kv: KVCaches) -> None:
        """Append context: keys and values of every layer from the target's features.

        Args:
            features_TFH: outputs of the target's `target_layer_ids`, in their order.
            positions_T: absolute positions.
            kv_indices: by KV group, int64 [T]: where each row's keys go.
            kv: the drafter's caches.
        """
        context_TH = self._hidden_norm(self._fc(features_TFH.flatten(1)))
        rope = self._rope.cos_sin(positions_T, self._dtype)
        for config, layer in zip(self.config.layers, self._layers, strict=True):
            layer.write_keys(context_TH, rope[config.kind], kv_indices[kv.group_of(config.index)], kv)

    def denoise(self, embedded_TH: Tensor, batch: ForwardBatch, kv: KVCaches) -> Tensor:
        """Hidden states [T, H] of block rows, to be scored by the target's head: row r predicts its own position."""
        rope = self._rope.cos_sin(batch.positions_T, self._dtype)
        x_TH = embedded_TH
        normed_TH = self._layers[0].input_norm(x_TH)
        next_norms = [*(layer.input_norm.norm for layer in self._layers[1:]), self._norm.norm]
        for config, layer, next_norm in zip(self.config.layers, self._layers, next_norms, strict=True):
            x_TH, normed_TH = layer(x_TH, normed_TH, rope[config.kind], batch, kv, next_norm)
        multiplier = self.config.output_multiplier
        return normed_TH if multiplier == 1 else normed_TH * multiplier

    def weight_targets(self) -> list[WeightTarget]:
        """Every tensor of a drafter checkpoint: it has neither embedding nor head."""
        targets = self._fc.weight_targets() + self._hidden_norm.weight_targets() + self._norm.weight_targets()
        for layer in self._layers:
            targets += layer.weight_targets()
        return targets
