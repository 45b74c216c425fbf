"""What becomes of a projection's heads before attention: norm, rotation, and for keys and values their page.

Shape legend: T rows, N query heads, K KV heads, D head dim; pages are [pages, page_size, K, D].
"""

from __future__ import annotations

from torch import Tensor

from gemray_kernels.reference.kv_write import write_kv
from gemray_kernels.reference.rms_norm import rms_norm
from gemray_kernels.reference.rope import apply_rope


def norm_rope(x_TND: Tensor, weight_D: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, eps: float) -> Tensor:
    """Norm and rotate every head; x's shape and dtype, rounded after the norm."""
    return apply_rope(rms_norm(x_TND, weight_D, eps), cos_T1D, sin_T1D)


def write_normed_kv(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k_weight_D: Tensor,
    cos_T1D: Tensor,
    sin_T1D: Tensor,
    eps: float,
    k_pages: Tensor,
    v_pages: Tensor,
    kv_index_T: Tensor,
) -> None:
    """Store normed, rotated keys and values normed without a weight (spec 1.4), as `write_kv` does.

    `k_TKD` and `v_TKD` may be one tensor: where a layer has no value projection, V is made of the raw keys.
    """
    k_TKD = norm_rope(k_TKD, k_weight_D, cos_T1D, sin_T1D, eps)
    write_kv(k_TKD, rms_norm(v_TKD, None, eps), k_pages, v_pages, kv_index_T)
