"""From a stacked query, key and value product to attention: norms, rotation, and the write to pages.

Shape legend: T rows, S summands, N query heads, K KV heads, D head dim, O = N D or (N + K) D or (N + 2 K) D outputs;
pages are [pages, page_size, K, D].
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gemray_kernels.reference.kv_write import write_kv
from gemray_kernels.reference.layer_norms import Norm, total
from gemray_kernels.reference.rms_norm import rms_norm
from gemray_kernels.reference.rope import apply_rope


@dataclass(frozen=True)
class KVWrite:
    """Where the rows' keys and values go."""

    k_norm: Norm
    normed_values: bool
    """Whether values are normed too, without a weight."""
    k_pages: Tensor
    v_pages: Tensor
    kv_index_T: Tensor
    k_scale: float = 1.0
    """The scale of all keys in pages of 8-bit floats (`gemray_kernels.fp8_kv`)."""
    v_scale: float = 1.0
    """The scale of all values there."""


def attention_inputs(
    summands_STO: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, num_heads: int, q_norm: Norm | None, write: KVWrite | None
) -> Tensor:
    """Normed, rotated queries [T, N, D] in the angles' dtype; keys, normed and rotated, and values go to their pages.

    Args:
        summands_STO: parts of ``[q | k | v]``, added as `total` adds and rounded; without v, values are made of the raw
            keys; without k and v, nothing is written.
        cos_T1D: of each row's angles.
        sin_T1D: as `cos_T1D`.
        num_heads: N; 0 where only keys and values are wanted.
        q_norm: of the query heads; None where there are none.
        write: for keys and values; None where there are none.
    """
    head_dim = cos_T1D.shape[-1]
    heads_TND = total(summands_STO, cos_T1D.dtype).view(summands_STO.shape[1], -1, head_dim)
    q_TND = heads_TND[:, :num_heads]
    if q_norm is not None:
        q_TND = apply_rope(q_norm(q_TND), cos_T1D, sin_T1D)
    if write is not None:
        num_kv_heads = write.k_pages.shape[2]
        k_TKD = heads_TND[:, num_heads : num_heads + num_kv_heads]
        v_TKD = heads_TND[:, -num_kv_heads:]
        if write.normed_values:
            v_TKD = rms_norm(v_TKD, None, write.k_norm.eps)
        k_TKD = apply_rope(write.k_norm(k_TKD), cos_T1D, sin_T1D)
        write_kv(
            k_TKD,
            v_TKD,
            write.k_pages,
            write.v_pages,
            write.kv_index_T,
            k_scale=write.k_scale,
            v_scale=write.v_scale,
        )
    return q_TND
