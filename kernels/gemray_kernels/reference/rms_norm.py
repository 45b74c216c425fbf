"""Root-mean-square normalisation (Zhang & Sennrich, arXiv 1910.07467), as Gemma 4 rounds it (spec 1.2)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x · (mean(x²) + eps)^(-1/2) · weight`` over the last axis, in `x`'s shape and dtype.

    The weight multiplies in the compute dtype, before the cast back; it is plain `w`, not ``1 + w``.

    Args:
        x: [..., D].
        weight: [D], or None for a norm without scale.
        eps: added to the mean square.
    """
    return functional.rms_norm(x, [x.shape[-1]], weight, eps)


def rms_norm_then_scale(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `rms_norm`, but cast back to `x`'s dtype before the weight multiplies: Qwen3's rounding (spec 5.2)."""
    return rms_norm(x, None, eps) * weight


def add_rms_norm(
    residual_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, scale: Tensor | None = None
) -> Tensor:
    """``(residual + rms_norm(x)) · scale``, rounded to `x`'s dtype after each of the three.

    Args:
        residual_TD: the stream that the norm is added to.
        x_TD: what is normed.
        weight_D: of the norm.
        eps: added to the mean square.
        scale: [1], or None for no factor.
    """
    sum_TD = residual_TD + rms_norm(x_TD, weight_D, eps)
    return sum_TD if scale is None else sum_TD * scale
