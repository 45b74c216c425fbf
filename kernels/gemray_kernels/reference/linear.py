"""Linear layers, whole or as summands that their reader adds up.

Shape legend: T rows, I inputs (of a gated layer: its width), O outputs, S summands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.precision import wide_linear
from gemray_kernels.reference.activation import gelu_tanh, gelu_tanh_and_mul, silu_and_mul
from gemray_kernels.reference.layer_norms import total


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """``x · weightᵀ`` [T, O]."""
    return torch.nn.functional.linear(x_TI, weight_OI)


def summands(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Parts [S, T, O] whose `total`, rounded once to `x`'s dtype, is ``x · weightᵀ``."""
    return linear(x_TI, weight_OI).unsqueeze(0)


def wide_summands(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Parts [S, T, O] in the compute dtype whose `total` is ``x · weightᵀ``, unrounded."""
    return wide_linear(x_TI, weight_OI).unsqueeze(0)


def gelu_linear(x_TH: Tensor, gate_up_2IH: Tensor) -> Tensor:
    """``gelu_tanh(gate(x)) · up(x)`` [T, I] of ``gate_up = [gate; up]``."""
    return gelu_tanh_and_mul(linear(x_TH, gate_up_2IH))


def silu_linear(x_TH: Tensor, gate_up_2IH: Tensor) -> Tensor:
    """``silu(gate(x)) · up(x)`` [T, I] of ``gate_up = [gate; up]``."""
    return silu_and_mul(linear(x_TH, gate_up_2IH))


def gelu_of_total_and_mul(summands_STO: Tensor, factor_TO: Tensor) -> Tensor:
    """``gelu_tanh(Σ summands) · factor`` [T, O] in the factor's dtype."""
    return gelu_tanh(total(summands_STO, factor_TO.dtype)) * factor_TO


def gated_projection(summands_STI: Tensor, factor_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Parts [S, T, O] of the product of `gelu_of_total_and_mul` with a weight."""
    return summands(gelu_of_total_and_mul(summands_STI, factor_TI), weight_OI)
