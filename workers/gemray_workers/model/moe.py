"""Routed experts: the router whole on every rank, each expert's width sharded (spec 1.9 and 6.1).

Shape legend: T rows, H hidden size, E experts, K experts a row, R = T K (row, expert) pairs, I local expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.activation import gelu_tanh_and_mul
from gemray_kernels.grouped_linear import grouped_linear
from gemray_kernels.precision import compute_dtype, wide_linear
from gemray_kernels.rms_norm import rms_norm
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.model.config import ModelConfig, MoEConfig
from gemray_workers.model.placement import Placement, slice_copy, sliced_tensor, whole_tensor
from gemray_workers.parallel.communicator import Communicator


class Router:
    """Chooses K experts for every row. Ranks agree because their inputs are bit-identical."""

    def __init__(self, prefix: str, model: ModelConfig, moe: MoEConfig, place: Placement) -> None:
        self._prefix = prefix
        self._top_k = moe.top_k
        self._eps = model.rms_norm_eps
        self._root = model.hidden_size**-0.5
        self._weight_EH = place.empty(moe.num_experts, model.hidden_size)
        self._scale_H = place.empty(model.hidden_size)
        self._per_expert_scale_E = place.empty(moe.num_experts)

    def __call__(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (compute dtype) and numbers of each row's experts, both [T, K]."""
        z_TH = rms_norm(x_TH, None, self._eps) * self._scale_H * self._root
        # Unrounded logits: close ones, rounded to 16 bits, would tie and pick other experts.
        probabilities_TE = torch.softmax(wide_linear(z_TH, self._weight_EH), dim=-1)
        weights_TK, experts_TK = probabilities_TE.topk(self._top_k, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK * self._per_expert_scale_E[experts_TK], experts_TK

    def weight_targets(self) -> list[WeightTarget]:
        """Projection and the two learned scales."""
        return [
            whole_tensor(f"{self._prefix}.proj.weight", self._weight_EH),
            whole_tensor(f"{self._prefix}.scale", self._scale_H),
            whole_tensor(f"{self._prefix}.per_expert_scale", self._per_expert_scale_E),
        ]


class Experts:
    """The experts' gated MLPs. Every rank holds a slice of each expert."""

    def __init__(self, prefix: str, hidden_size: int, moe: MoEConfig, comm: Communicator, place: Placement) -> None:
        self._prefix = prefix
        self._comm = comm
        self._num_experts = moe.num_experts
        self._part = place.part(moe.intermediate_size)
        self._gate_up_E2IH = place.empty(moe.num_experts, 2 * self._part.length, hidden_size)
        self._down_EHI = place.empty(moe.num_experts, hidden_size, self._part.length)

    def __call__(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Weighted sum of each row's experts [T, H], summed over the ranks."""
        num_rows, top_k = experts_TK.shape
        experts_R = experts_TK.flatten()
        order_R = experts_R.argsort(stable=True)
        ones_R = torch.ones_like(experts_R)
        counts_E = experts_R.new_zeros(self._num_experts).scatter_add_(0, experts_R, ones_R)
        row_ends_E = counts_E.cumsum(0).to(torch.int32)
        gate_up_R2I = grouped_linear(x_TH[order_R // top_k], self._gate_up_E2IH, row_ends_E)
        sorted_RH = grouped_linear(gelu_tanh_and_mul(gate_up_R2I), self._down_EHI, row_ends_E)
        outputs_RH = torch.empty_like(sorted_RH)
        outputs_RH[order_R] = sorted_RH
        outputs_TKH = outputs_RH.view(num_rows, top_k, -1).to(compute_dtype(x_TH.dtype))
        sum_TH = (outputs_TKH * weights_TK.unsqueeze(-1)).sum(dim=1)
        return self._comm.all_reduce(sum_TH.to(x_TH.dtype))

    def weight_targets(self) -> list[WeightTarget]:
        """The stacked expert weights: gate and up halves are sliced separately."""
        part = self._part
        gate, up = torch.split(self._gate_up_E2IH, part.length, dim=1)
        num_experts, _, hidden_size = self._gate_up_E2IH.shape
        gate_up = WeightTarget(
            f"{self._prefix}.gate_up_proj",
            (num_experts, 2 * part.whole, hidden_size),
            (slice_copy(1, part, gate), slice_copy(1, part, up, offset=part.whole)),
        )
        return [gate_up, sliced_tensor(f"{self._prefix}.down_proj", 2, part, self._down_EHI)]
