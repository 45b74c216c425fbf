"""What lies between two products of a layer: the sum of a product's parts, its norm, the residual sum, the next norms.

Shape legend: T rows, D width of the stream, S summands, K experts a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_kernels.numerics import is_tree, tree_sum
from gemray_kernels.precision import compute_dtype
from gemray_kernels.reference.experts import weighted_sum
from gemray_kernels.reference.rms_norm import add_rms_norm, rms_norm, rms_norm_then_scale


@dataclass(frozen=True)
class Norm:
    """How a norm of the stream scales and rounds."""

    weight_D: Tensor
    eps: float
    round_before_weight: bool = False
    """Qwen3's rounding: cast back before the weight multiplies."""
    factor: float | None = None
    """Multiplies the rounded result, which is rounded again."""

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Norm of every row, in `x`'s dtype."""
        norm = rms_norm_then_scale if self.round_before_weight else rms_norm
        y_TD = norm(x_TD, self.weight_D, self.eps)
        return y_TD if self.factor is None else y_TD * self.factor


def total(summands_STD: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over S, rounded once to `dtype`: by the tree of `gemray_kernels.numerics` for powers of two, or in order."""
    wide_STD = summands_STD.to(compute_dtype(dtype))
    if is_tree(len(wide_STD)):
        return tree_sum(wide_STD).to(dtype)
    first, *others = wide_STD.unbind()
    return sum(others, first).to(dtype)


def add_then_norms(
    residual_TD: Tensor,
    summands_STD: Tensor,
    post_norm: Norm | None,
    scale: Tensor | None,
    norms: Sequence[Norm],
    *,
    lets_at_once: bool = False,
) -> tuple[Tensor, ...]:
    """The stream ``x = (residual + post_norm(Σ summands)) · scale``, and each of the norms of it, all [T, D].

    Everything is rounded to the residual's dtype where separate operations round.

    Args:
        residual_TD: the stream before.
        summands_STD: a product's parts, added as `total` adds.
        post_norm: of the sum; None adds it as it is.
        scale: [1], or None for no factor.
        norms: at most 3, of the new stream.
        lets_at_once: whether a kernel of this may let the one that reads the result start at once, as that asks for its
            weight before it waits (`gemray_kernels.triton.early_start`).
    """
    y_TD = total(summands_STD, residual_TD.dtype)
    if post_norm is None:
        x_TD = residual_TD + y_TD
        x_TD = x_TD if scale is None else x_TD * scale
    else:
        x_TD = add_rms_norm(residual_TD, y_TD, post_norm.weight_D, post_norm.eps, scale)
    return (x_TD, *(norm(x_TD) for norm in norms))


def add_experts_then_norms(
    residual_TD: Tensor,
    dense_STD: Tensor,
    dense_norm: Norm,
    routed_TKD: Tensor,
    weights_TK: Tensor,
    routed_norm: Norm,
    post_norm: Norm,
    scale: Tensor | None,
    norms: Sequence[Norm],
    *,
    lets_at_once: bool = False,
) -> tuple[Tensor, ...]:
    """As `add_then_norms`, of the sum of two norms: of a dense product's parts and of the weighted sum of experts.

    Args:
        residual_TD: the stream before.
        dense_STD: the dense product's parts, added as `total` adds.
        dense_norm: of their sum.
        routed_TKD: outputs of each row's experts.
        weights_TK: of each row's experts.
        routed_norm: of their weighted sum.
        post_norm: of the two norms' sum.
        scale: [1], or None for no factor.
        norms: at most 3, of the new stream.
        lets_at_once: as of `add_then_norms`.
    """
    routed_TD = routed_norm(weighted_sum(routed_TKD, weights_TK, residual_TD.dtype))
    both_TD = dense_norm(total(dense_STD, residual_TD.dtype)) + routed_TD
    return add_then_norms(residual_TD, both_TD.unsqueeze(0), post_norm, scale, norms)
