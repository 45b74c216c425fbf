"""From a router's product to each row's experts, and the experts' outputs before they are weighed.

Shape legend: T rows, H hidden size, S summands, E experts, K experts a row, R = T K (row, expert) pairs,
I expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.reference.activation import gelu_tanh_and_mul
from gemray_kernels.reference.experts import choose_experts
from gemray_kernels.reference.grouped_linear import grouped_linear
from gemray_kernels.reference.layer_norms import total


def route(summands_STE: Tensor, scale_E: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """`choose_experts` of the sum of a router's summands, which is not rounded: close logits would tie."""
    return choose_experts(total(summands_STE, summands_STE.dtype), scale_E, top_k)


def expert_outputs(x_TH: Tensor, experts_TK: Tensor, gate_up_E2IH: Tensor, down_EHI: Tensor) -> Tensor:
    """``down(gelu_tanh(gate(x)) · up(x))`` [T, K, H] of each row's experts.

    Args:
        x_TH: the experts' input.
        experts_TK: int64, K different ones a row.
        gate_up_E2IH: gate halves above up halves.
        down_EHI: the second layer.
    """
    num_rows, top_k = experts_TK.shape
    experts_R = experts_TK.flatten()
    order_R = experts_R.argsort(stable=True)
    counts_E = experts_R.new_zeros(gate_up_E2IH.shape[0]).scatter_add_(0, experts_R, experts_R.new_ones(len(experts_R)))
    row_ends_E = counts_E.cumsum(0).to(torch.int32)
    gate_up_R2I = grouped_linear(x_TH[order_R // top_k], gate_up_E2IH, row_ends_E)
    sorted_RH = grouped_linear(gelu_tanh_and_mul(gate_up_R2I), down_EHI, row_ends_E)
    outputs_RH = sorted_RH.new_empty(sorted_RH.shape)
    outputs_RH[order_R] = sorted_RH
    return outputs_RH.view(num_rows, top_k, -1)
