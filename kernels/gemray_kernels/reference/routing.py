"""From a router's product to each row's experts, and the experts' outputs before they are weighed.

Shape legend: T rows, H hidden size, S summands, E experts, K experts a row, R = T K (row, expert) pairs,
I expert width.
"""

from __future__ import annotations

from torch import Tensor

from gemray_kernels.reference.experts import choose_experts, gated_by_expert
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
    return gated_by_expert(
        x_TH,
        experts_TK,
        gate_up_E2IH.shape[0],
        lambda x_RH, row_ends_E: grouped_linear(x_RH, gate_up_E2IH, row_ends_E),
        lambda x_RI, row_ends_E: grouped_linear(x_RI, down_EHI, row_ends_E),
    )
