"""Routed experts in exact numerics (`gemray_kernels.numerics`), by elementwise operations alone.

The order of each pair's sums is that of `exact_linear`: which rows chose the same expert does not matter.

Shape legend: T rows, H hidden size, E experts, K experts a row, R = T K (row, expert) pairs, P pairs of one expert,
I expert width (the local one).
"""

from __future__ import annotations

from torch import Tensor

from gemray_kernels.numerics import tree_sum
from gemray_kernels.precision import compute_dtype
from gemray_kernels.reference.exact_linear import check_leaves, gelu_linear, wide_summands


def expert_outputs(x_TH: Tensor, experts_TK: Tensor, gate_up_E2IH: Tensor, down_EHI: Tensor, leaves: int) -> Tensor:
    """``down(gelu_tanh(gate(x)) · up(x))`` [T, K, H] of each row's experts, rounded once to `x`'s dtype.

    Args:
        x_TH: the experts' input.
        experts_TK: int64, K different ones a row.
        gate_up_E2IH: gate halves above up halves; each is a product of one leaf.
        down_EHI: the second layer.
        leaves: into which this layer's inputs are cut: 8, or a rank's share of 8.

    Raises:
        ValueError: the inputs cannot be cut into so many leaves.
    """
    return expert_subtrees(x_TH, experts_TK, gate_up_E2IH, down_EHI, leaves).to(x_TH.dtype)


def expert_subtrees(x_TH: Tensor, experts_TK: Tensor, gate_up_E2IH: Tensor, down_EHI: Tensor, leaves: int) -> Tensor:
    """As `expert_outputs`, of one rank's part of each expert, unrounded: to be added by the tree over ranks."""
    num_rows, top_k = experts_TK.shape
    num_experts, hidden_size, width = down_EHI.shape
    check_leaves(width, leaves)
    experts_R = experts_TK.flatten()
    outputs_RH = x_TH.new_empty(num_rows * top_k, hidden_size, dtype=compute_dtype(x_TH.dtype))
    for expert in range(num_experts):
        pairs_P = (experts_R == expert).nonzero().flatten()
        if pairs_P.numel():
            gated_PI = gelu_linear(x_TH[pairs_P // top_k], gate_up_E2IH[expert], 1)
            outputs_RH[pairs_P] = tree_sum(wide_summands(gated_PI, down_EHI[expert], leaves))
    return outputs_RH.view(num_rows, top_k, hidden_size)
