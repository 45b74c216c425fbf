"""One layer of the DFlash drafter: Qwen3's pre-norm layer, with keys made of the target's features (spec 5.2).

Shape legend: T rows, S summands, O outputs, H hidden size, N query heads, K KV heads (this rank's), D head dim.
"""

from __future__ import annotations

from torch import Tensor

from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.layer_norms import Norm
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.drafters.dflash.config import DFlashConfig
from gemray_workers.kv.cache import KVCaches
from gemray_workers.model.attention import AttentionKernel
from gemray_workers.model.batch import ForwardBatch
from gemray_workers.model.linear import ColumnParallelLinear, RowParallelLinear
from gemray_workers.model.rope import CosSin
from gemray_workers.model.weight_sharding import WeightSharding, whole_tensor
from gemray_workers.parallel.communicator import Communicator


class ScaleNorm:
    """Qwen3's norm: rounded to the stream's dtype before the weight multiplies, unlike Gemma's."""

    def __init__(self, name: str, width: int, eps: float, sharding: WeightSharding) -> None:
        self.weight = sharding.empty(width)
        self.norm = Norm(self.weight, eps, round_before_weight=True)
        self._name = name
        self._rms_norm_then_scale = sharding.kernels.rms_norm_then_scale

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of `x` [..., width], in its dtype."""
        return self._rms_norm_then_scale(x, self.weight, self.norm.eps)

    def weight_targets(self) -> list[WeightTarget]:
        """The norm's weight."""
        return [whole_tensor(f"{self._name}.weight", self.weight)]


class DFlashLayer:
    """Attention of block rows over context and block, then a gated MLP; heads and width sharded over the ranks."""

    def __init__(
        self, config: DFlashConfig, index: int, comm: Communicator, sharding: WeightSharding, kernel: AttentionKernel
    ) -> None:
        layer, hidden_size, eps = config.layers[index], config.hidden_size, config.rms_norm_eps
        prefix = f"layers.{index}"
        self._comm = comm
        self._kernel = kernel
        self._kernels = sharding.kernels
        self._layer = layer
        self._causal = config.causal[index]
        heads, kv_heads = sharding.part(config.num_attention_heads), sharding.part(layer.num_kv_heads)
        query, keys = heads.times(layer.head_dim), kv_heads.times(layer.head_dim)
        attention = f"{prefix}.self_attn"
        self.input_norm = ScaleNorm(f"{prefix}.input_layernorm", hidden_size, eps, sharding)
        self._num_heads = heads.length
        self._qkv_proj = ColumnParallelLinear(
            [(f"{attention}.q_proj", query), (f"{attention}.k_proj", keys), (f"{attention}.v_proj", keys)],
            hidden_size,
            sharding,
        )
        self._q_norm = ScaleNorm(f"{attention}.q_norm", layer.head_dim, eps, sharding)
        self._k_norm = ScaleNorm(f"{attention}.k_norm", layer.head_dim, eps, sharding)
        self._o_proj = RowParallelLinear(f"{attention}.o_proj", query, hidden_size, sharding)
        self._post_norm = ScaleNorm(f"{prefix}.post_attention_layernorm", hidden_size, eps, sharding)
        width = sharding.part(layer.intermediate_size)
        self._gate_up_proj = ColumnParallelLinear(
            [(f"{prefix}.mlp.gate_proj", width), (f"{prefix}.mlp.up_proj", width)], hidden_size, sharding
        )
        self._down_proj = RowParallelLinear(f"{prefix}.mlp.down_proj", width, hidden_size, sharding)

    def write_keys(self, x_TH: Tensor, rope: CosSin, kv_index_T: Tensor, kv: KVCaches) -> None:
        """Store keys and values of context features [T, H]."""
        kv_STO = self._qkv_proj.summands(x_TH, first=self._qkv_proj.sizes[0])
        self._kernels.attention_inputs(kv_STO, *rope, 0, None, self._write(kv_index_T, kv))

    def __call__(
        self, x_TH: Tensor, normed_TH: Tensor, rope: CosSin, batch: ForwardBatch, kv: KVCaches, next_norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """The residual stream of the block rows after this layer, and its next norm, both [T, H].

        Args:
            x_TH: the stream before it.
            normed_TH: this layer's `input_norm` of it.
            rope: angles for this layer's type.
            batch: whose rows these are.
            kv: the drafter's caches.
            next_norm: of the next layer, or the drafter's last.
        """
        attended_STH = self._attend(normed_TH, rope, batch, kv)
        x_TH, normed_TH = self._kernels.add_then_norms(
            x_TH,
            attended_STH,
            None,
            None,
            [self._post_norm.norm],
            lets_at_once=self._gate_up_proj.gate_starts_at_once(len(x_TH)),
        )
        gated_TI = self._gate_up_proj.silu(normed_TH)
        down_STH = self._down_proj.summands(gated_TI, self._comm)
        x_TH, normed_TH = self._kernels.add_then_norms(
            x_TH, down_STH, None, None, [next_norm], lets_at_once=self._qkv_proj.starts_at_once(len(x_TH))
        )
        return x_TH, normed_TH

    def _attend(self, normed_TH: Tensor, rope: CosSin, batch: ForwardBatch, kv: KVCaches) -> Tensor:
        """The block's keys go behind the context's, where the next context rows will overwrite them."""
        metadata = batch.groups[kv.group_of(self._layer.index)]
        q_TND = self._kernels.attention_inputs(
            self._qkv_proj.summands(normed_TH),
            *rope,
            self._num_heads,
            self._q_norm.norm,
            self._write(metadata.kv_index_T, kv),
        )
        cache = kv.reader(self._layer.index)
        o_TND = self._kernel(
            q_TND,
            cache.k_pages,
            cache.v_pages,
            metadata.block_table_SP,
            batch.query_start_Z,
            batch.kv_len_S,
            window=self._layer.window,
            causal=self._causal,
            scale=self._layer.head_dim**-0.5,
            most_rows=batch.most_rows,
            reader_comes_ahead=self._o_proj.comes_ahead(len(q_TND), self._comm),
        )
        return self._o_proj.summands(o_TND.flatten(1), self._comm)

    def _write(self, kv_index_T: Tensor, kv: KVCaches) -> KVWrite:
        pages = kv.writer(self._layer.index)
        return KVWrite(
            k_norm=self._k_norm.norm,
            normed_values=False,
            k_pages=pages.k_pages,
            v_pages=pages.v_pages,
            kv_index_T=kv_index_T,
        )

    def weight_targets(self) -> list[WeightTarget]:
        """Every tensor of this layer."""
        parts = (
            self.input_norm,
            self._qkv_proj,
            self._q_norm,
            self._k_norm,
            self._o_proj,
            self._post_norm,
            self._gate_up_proj,
            self._down_proj,
        )
        return [target for part in parts for target in part.weight_targets()]
