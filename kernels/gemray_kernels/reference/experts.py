"""Routed experts: which ones serve a row, and their gated MLPs over the rows (spec 1.9).

Shape legend: T rows, H hidden size, E experts, K experts a row, R = T K (row, expert) pairs, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gemray_kernels.precision import compute_dtype
from gemray_kernels.reference.activation import gelu_tanh_and_mul
from gemray_kernels.reference.grouped_linear import grouped_linear

GroupedLinear = Callable[[Tensor, Tensor], Tensor]
"""From rows [R, I] sorted by expert and the ends [E] of each expert's rows to outputs [R, O]."""


def choose_experts(logits_TE: Tensor, scale_E: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights (the logits' dtype) and numbers [T, K] of each row's K most probable experts, best first.

    Logits decide, and equal ones go to the smaller number: probabilities tie where logits don't, and a `topk` leaves
    ties to the device, so that two devices (or a batch of another size) would run other experts.
    Weights are softmax probabilities, renormalised over the K, times the expert's scale.
    """
    experts_TK = logits_TE.argsort(dim=-1, descending=True, stable=True)[:, :top_k].contiguous()
    weights_TK = torch.softmax(logits_TE, dim=-1).gather(1, experts_TK)
    weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK * scale_E[experts_TK], experts_TK


def gated_experts(
    x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_E2IH: Tensor, down_EHI: Tensor
) -> Tensor:
    """Weighted sum [T, H] of each row's experts ``down(gelu_tanh(gate(x)) · up(x))``, summed in the compute dtype.

    Args:
        x_TH: the experts' input.
        weights_TK: of each row's experts.
        experts_TK: int64, K different ones a row.
        gate_up_E2IH: gate halves above up halves.
        down_EHI: the second layer.
    """
    outputs_TKH = gated_by_expert(
        x_TH,
        experts_TK,
        gate_up_E2IH.shape[0],
        lambda x_RH, row_ends_E: grouped_linear(x_RH, gate_up_E2IH, row_ends_E),
        lambda x_RI, row_ends_E: grouped_linear(x_RI, down_EHI, row_ends_E),
    )
    return weighted_sum(outputs_TKH, weights_TK, x_TH.dtype)


def gated_by_expert(
    x_TH: Tensor, experts_TK: Tensor, num_experts: int, gate_up: GroupedLinear, down: GroupedLinear
) -> Tensor:
    """``down(gelu_tanh(gate(x)) · up(x))`` [T, K, H] of each row's experts.

    Args:
        x_TH: the experts' input.
        experts_TK: int64, K different ones a row.
        num_experts: E.
        gate_up: every expert's product with gate halves above up halves.
        down: every expert's second product.
    """
    num_rows, top_k = experts_TK.shape
    experts_R = experts_TK.flatten()
    order_R = experts_R.argsort(stable=True)
    counts_E = experts_R.new_zeros(num_experts).scatter_add_(0, experts_R, torch.ones_like(experts_R))
    row_ends_E = counts_E.cumsum(0).to(torch.int32)
    gate_up_R2I = gate_up(x_TH[order_R // top_k], row_ends_E)
    sorted_RH = down(gelu_tanh_and_mul(gate_up_R2I), row_ends_E)
    outputs_RH = torch.empty_like(sorted_RH)
    outputs_RH[order_R] = sorted_RH
    return outputs_RH.view(num_rows, top_k, -1)


def weighted_sum(outputs_TKH: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum [T, H] over K by weights, in the compute dtype and in order, then rounded to `dtype`."""
    first_TH, *others = (outputs_TKH.to(compute_dtype(dtype)) * weights_TK.unsqueeze(-1)).unbind(1)
    return sum(others, first_TH).to(dtype)
