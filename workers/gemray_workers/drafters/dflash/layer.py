"""One layer of the DFlash drafter: Qwen3's pre-norm layer, with keys made of the target's features (spec 5.2).

Shape legend: T rows, H hidden size, N query heads, K KV heads (this rank's), D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.drafters.dflash.config import DFlashConfig
from gemray_workers.kv.cache import KVCaches
from gemray_workers.model.attention import AttentionKernel
from gemray_workers.model.batch import ForwardBatch
from gemray_workers.model.linear import ColumnParallelLinear, RowParallelLinear
from gemray_workers.model.placement import Placement, whole_tensor
from gemray_workers.model.rope import CosSin
from gemray_workers.parallel.communicator import Communicator


class ScaleNorm:
    """Qwen3's norm: rounded to the stream's dtype before the weight multiplies, unlike Gemma's."""

    def __init__(self, name: str, width: int, eps: float, place: Placement) -> None:
        self.weight = place.empty(width)
        self._name = name
        self._eps = eps
        self._norm = place.kernels.rms_norm_then_scale

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of `x` [..., width], in its dtype."""
        return self._norm(x, self.weight, self._eps)

    def weight_targets(self) -> list[WeightTarget]:
        """The norm's weight."""
        return [whole_tensor(f"{self._name}.weight", self.weight)]


class DFlashLayer:
    """Attention of block rows over context and block, then a gated MLP; heads and width sharded over the ranks."""

    def __init__(
        self, config: DFlashConfig, index: int, comm: Communicator, place: Placement, kernel: AttentionKernel
    ) -> None:
        layer, hidden_size, eps = config.layers[index], config.hidden_size, config.rms_norm_eps
        prefix = f"layers.{index}"
        self._comm = comm
        self._kernel = kernel
        self._kernels = place.kernels
        self._layer = layer
        self._causal = config.causal[index]
        heads, kv_heads = place.part(config.num_attention_heads), place.part(layer.num_kv_heads)
        query, keys = heads.times(layer.head_dim), kv_heads.times(layer.head_dim)
        attention = f"{prefix}.self_attn"
        self._input_norm = ScaleNorm(f"{prefix}.input_layernorm", hidden_size, eps, place)
        self._q_proj = ColumnParallelLinear([(f"{attention}.q_proj", query)], hidden_size, place)
        self._kv_proj = ColumnParallelLinear(
            [(f"{attention}.k_proj", keys), (f"{attention}.v_proj", keys)], hidden_size, place
        )
        self._q_norm = ScaleNorm(f"{attention}.q_norm", layer.head_dim, eps, place)
        self._k_norm = ScaleNorm(f"{attention}.k_norm", layer.head_dim, eps, place)
        self._o_proj = RowParallelLinear(f"{attention}.o_proj", query, hidden_size, place)
        self._post_norm = ScaleNorm(f"{prefix}.post_attention_layernorm", hidden_size, eps, place)
        width = place.part(layer.intermediate_size)
        self._gate_up_proj = ColumnParallelLinear(
            [(f"{prefix}.mlp.gate_proj", width), (f"{prefix}.mlp.up_proj", width)], hidden_size, place
        )
        self._down_proj = RowParallelLinear(f"{prefix}.mlp.down_proj", width, hidden_size, place)

    def write_keys(self, x_TH: Tensor, rope: CosSin, slot_mapping_T: Tensor, kv: KVCaches) -> None:
        """Store keys and values of `x` [T, H]: of context features, or of the normed rows of a block."""
        k_TKD, v_TKD = (self._heads(part) for part in torch.split(self._kv_proj(x_TH), self._kv_proj.sizes, dim=-1))
        kv.writer(self._layer.index).write(self._kernels.apply_rope(self._k_norm(k_TKD), *rope), v_TKD, slot_mapping_T)

    def __call__(self, x_TH: Tensor, rope: CosSin, batch: ForwardBatch, kv: KVCaches) -> Tensor:
        """The residual stream [T, H] of the block rows after this layer."""
        x_TH = x_TH + self._attend(self._input_norm(x_TH), rope, batch, kv)
        gated_TI = self._kernels.silu_and_mul(self._gate_up_proj(self._post_norm(x_TH)))
        return x_TH + self._comm.all_reduce(self._down_proj.partial_sum(gated_TI))

    def _attend(self, normed_TH: Tensor, rope: CosSin, batch: ForwardBatch, kv: KVCaches) -> Tensor:
        """The block's keys go behind the context's, where the next context rows will overwrite them."""
        metadata = batch.groups[kv.group_of(self._layer.index)]
        self.write_keys(normed_TH, rope, metadata.slot_mapping_T, kv)
        cache = kv.reader(self._layer.index)
        o_TND = self._kernel(
            self._kernels.apply_rope(self._q_norm(self._heads(self._q_proj(normed_TH))), *rope),
            cache.k_pages,
            cache.v_pages,
            metadata.block_table_SP,
            batch.query_start_S1,
            batch.kv_len_S,
            window=self._layer.window,
            causal=self._causal,
            scale=self._layer.head_dim**-0.5,
        )
        return self._comm.all_reduce(self._o_proj.partial_sum(o_TND.flatten(1)))

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(rows.shape[0], -1, self._layer.head_dim)

    def weight_targets(self) -> list[WeightTarget]:
        """Every tensor of this layer."""
        parts = (
            self._input_norm,
            self._q_proj,
            self._kv_proj,
            self._q_norm,
            self._k_norm,
            self._o_proj,
            self._post_norm,
            self._gate_up_proj,
            self._down_proj,
        )
        return [target for part in parts for target in part.weight_targets()]
