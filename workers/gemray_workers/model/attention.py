"""Self-attention of one decoder layer, heads sharded over the ranks (spec 1.4 and 6.1).

Shape legend: T rows, U of them whose output is used, S summands, H hidden size, N query heads, K KV heads (this
rank's), D head dim.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.keys_of_values import KeysOfValues
from gemray_kernels.reference.rope import rotating_pairs
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.kv.cache import KVCaches
from gemray_workers.model.batch import ForwardBatch, OutputRows
from gemray_workers.model.config import LayerConfig, ModelConfig
from gemray_workers.model.kv_groups import first_kv_head, local_kv_heads
from gemray_workers.model.linear import ColumnParallelLinear, RowParallelLinear
from gemray_workers.model.norm import RMSNorm
from gemray_workers.model.rope import CosSin
from gemray_workers.model.weight_sharding import Part, WeightSharding
from gemray_workers.parallel.communicator import Communicator

ATTENTION_SCALE = 1.0
"""Gemma 4 neither divides scores by sqrt(D) nor caps them: the norms of q and k bound them."""


class AttentionKernel(Protocol):
    """Signature of `gemray_kernels.reference.paged_attention.paged_attention`, which states the masks."""

    def __call__(
        self,
        q_TND: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table_SP: Tensor,
        query_start_Z: Tensor,
        kv_len_S: Tensor,
        *,
        window: int | None,
        causal: bool,
        scale: float,
        most_rows: int | None = None,
        most_keys: int | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        keys_of_values: KeysOfValues | None = None,
        reader_comes_ahead: bool = False,
    ) -> Tensor:
        """Attend over paged keys and values."""
        ...


class Attention:
    """Attention over the layer's own KV cache or, on KV-shared layers, over the donor's, which it cannot write."""

    def __init__(
        self,
        prefix: str,
        model: ModelConfig,
        layer: LayerConfig,
        comm: Communicator,
        sharding: WeightSharding,
        kernel: AttentionKernel,
    ) -> None:
        self._comm = comm
        self._kernel = kernel
        self._kernels = sharding.kernels
        self._layer = layer
        heads = sharding.part(model.num_attention_heads)
        self._num_heads = heads.length
        kv_heads = Part(
            start=first_kv_head(layer.num_kv_heads, sharding.size, sharding.rank),
            length=local_kv_heads(layer.num_kv_heads, sharding.size),
            whole=layer.num_kv_heads,
        )
        outputs = [(f"{prefix}.q_proj", heads.times(layer.head_dim))]
        if self._owns_kv:
            outputs.append((f"{prefix}.k_proj", kv_heads.times(layer.head_dim)))
            if not layer.k_eq_v:
                outputs.append((f"{prefix}.v_proj", kv_heads.times(layer.head_dim)))
            self._k_norm = RMSNorm(f"{prefix}.k_norm", layer.head_dim, model.rms_norm_eps, sharding)
        self._qkv_proj = ColumnParallelLinear(outputs, model.hidden_size, sharding)
        self._q_norm = RMSNorm(f"{prefix}.q_norm", layer.head_dim, model.rms_norm_eps, sharding)
        self._o_proj = RowParallelLinear(f"{prefix}.o_proj", heads.times(layer.head_dim), model.hidden_size, sharding)

    @property
    def _owns_kv(self) -> bool:
        return self._layer.kv_donor is None

    @property
    def _cache_layer(self) -> int:
        return self._layer.index if self._layer.kv_donor is None else self._layer.kv_donor

    @property
    def _keys_of_values(self) -> KeysOfValues | None:
        """How keys follow from values where both are one projection; only who writes them has the keys' norm."""
        if not (self._owns_kv and self._layer.k_eq_v):
            return None
        num_rotating = rotating_pairs(self._layer.head_dim, self._layer.rope.partial_rotary_factor)
        return KeysOfValues(self._k_norm.norm.weight_D, num_rotating)

    def __call__(
        self, x_TH: Tensor, rope: CosSin, batch: ForwardBatch, kv: KVCaches, outputs: OutputRows | None = None
    ) -> Tensor:
        """Summands [S, T, H] of the output, the same on every rank; writes the rows' K and V first where the layer owns
        KV. With `outputs` [S, U, H], of those rows alone."""
        q_TND = self.queries(x_TH, rope, batch, kv)
        if outputs is not None:
            # Unlike kernels that start early, this one begins, and attention behind it, when all keys are written.
            q_TND, batch = q_TND[outputs.place_U], outputs.batch
        cache = kv.reader(self._cache_layer)
        # Of more sequences than rows, as of several prompts of which one row is used, attention has the programs of a
        # row for each, so that a start has compiled them.
        rows_or_sequences = max(len(q_TND), len(batch.kv_len_S) - 1)
        o_TND = self._kernel(
            q_TND,
            cache.k_pages,
            cache.v_pages,
            batch.groups[kv.group_of(self._cache_layer)].block_table_SP,
            batch.query_start_Z,
            batch.kv_len_S,
            window=self._layer.window,
            causal=True,
            scale=ATTENTION_SCALE,
            most_rows=batch.most_rows,
            most_keys=batch.most_keys,
            k_scale=cache.scales.k,
            v_scale=cache.scales.v,
            keys_of_values=self._keys_of_values,
            reader_comes_ahead=self._o_proj.comes_ahead(rows_or_sequences, self._comm),
        )
        return self._o_proj.summands(o_TND.flatten(1), self._comm)

    def starts_at_once(self, num_rows: int) -> bool:
        """Whether the kernel before is to let the first one of so many rows start at once."""
        return self._qkv_proj.starts_at_once(num_rows)

    def queries(self, x_TH: Tensor, rope: CosSin, batch: ForwardBatch, kv: KVCaches) -> Tensor:
        """Queries [T, N, D] after norm and RoPE; writes the rows' K and V where the layer owns KV."""
        write = None
        if self._owns_kv:
            # Without a v_proj, V is the key projection's raw output, before k_norm and RoPE.
            pages = kv.writer(self._cache_layer)
            write = KVWrite(
                k_norm=self._k_norm.norm,
                normed_values=True,
                k_pages=pages.k_pages,
                v_pages=pages.v_pages,
                kv_index_T=batch.groups[kv.group_of(self._cache_layer)].kv_index_T,
                k_scale=pages.scales.k,
                v_scale=pages.scales.v,
            )
        return self._kernels.attention_inputs(
            self._qkv_proj.summands(x_TH), *rope, self._num_heads, self._q_norm.norm, write
        )

    def weight_targets(self) -> list[WeightTarget]:
        """Projections and norms that this layer has."""
        norms = [self._q_norm, self._k_norm] if self._owns_kv else [self._q_norm]
        targets = self._qkv_proj.weight_targets() + self._o_proj.weight_targets()
        return targets + [target for norm in norms for target in norm.weight_targets()]
