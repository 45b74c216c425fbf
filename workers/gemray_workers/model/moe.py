"""Routed experts: the router whole on every rank, each expert's width sharded (spec 1.9 and 6.1).

Shape legend: T rows, H hidden size, E experts, K experts a row, R = T K (row, expert) pairs, I local expert width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gemray_kernels.reference.layer_norms import Norm
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.model.config import ModelConfig, MoEConfig
from gemray_workers.model.weight_sharding import WeightSharding, slice_copy, sliced_tensor, whole_tensor
from gemray_workers.parallel.communicator import Communicator

OnExperts = Callable[[Tensor], None]
"""Told of the experts [T, K] that a layer chose for its rows."""


class Router:
    """Chooses K experts for every row. Ranks agree because their inputs are bit-identical."""

    def __init__(self, prefix: str, model: ModelConfig, moe: MoEConfig, sharding: WeightSharding) -> None:
        self._prefix = prefix
        self._kernels = sharding.kernels
        self._top_k = moe.top_k
        self._weight_EH = sharding.empty(moe.num_experts, model.hidden_size)
        self._scale_H = sharding.empty(model.hidden_size)
        self.norm = Norm(self._scale_H, model.rms_norm_eps, round_before_weight=True, factor=model.hidden_size**-0.5)
        """Norm of the residual stream: what `__call__` takes."""
        self._per_expert_scale_E = sharding.empty(moe.num_experts)
        self.on_experts: OnExperts | None = None
        """For measurements, in cycles that run kernel by kernel."""

    def __call__(self, z_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (compute dtype) and numbers of each row's experts, both [T, K]."""
        # Unrounded logits: close ones, rounded to 16 bits, would tie and pick other experts.
        logits_STE = self._kernels.wide_summands(z_TH, self._weight_EH)
        weights_TK, experts_TK = self._kernels.route(logits_STE, self._per_expert_scale_E, self._top_k)
        if self.on_experts is not None:
            self.on_experts(experts_TK)
        return weights_TK, experts_TK

    def weight_targets(self) -> list[WeightTarget]:
        """Projection and the two learned scales."""
        return [
            whole_tensor(f"{self._prefix}.proj.weight", self._weight_EH),
            whole_tensor(f"{self._prefix}.scale", self._scale_H),
            whole_tensor(f"{self._prefix}.per_expert_scale", self._per_expert_scale_E),
        ]


class Experts:
    """The experts' gated MLPs. Every rank holds a slice of each expert."""

    def __init__(
        self, prefix: str, hidden_size: int, moe: MoEConfig, comm: Communicator, sharding: WeightSharding
    ) -> None:
        self._prefix = prefix
        self._comm = comm
        self._kernels = sharding.kernels
        self._part = sharding.part(moe.intermediate_size)
        self._gate_up_E2IH = sharding.empty(moe.num_experts, 2 * self._part.length, hidden_size)
        self._down_EHI = sharding.empty(moe.num_experts, hidden_size, self._part.length)

    def __call__(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [T, K, H] and the weights [T, K] that they are to be added with, the same on every rank.

        Over several ranks the sum is taken here, and is the only output: K = 1.
        """
        if self._comm.size == 1:
            return self._kernels.expert_outputs(x_TH, experts_TK, self._gate_up_E2IH, self._down_EHI), weights_TK
        sum_TH = self._comm.all_reduce(
            self._kernels.gated_experts(x_TH, weights_TK, experts_TK, self._gate_up_E2IH, self._down_EHI)
        )
        return sum_TH.unsqueeze(1), torch.ones_like(weights_TK[:, :1])

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
