"""Routed experts: the router whole on every rank, each expert's width sharded (spec 1.9 and 6.1).

Shape legend: T rows, H hidden size, E experts, K experts a row.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gemray_kernels.reference.layer_norms import Norm
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.model.config import ModelConfig, MoEConfig
from gemray_workers.model.expert_weights import expert_weights
from gemray_workers.model.linear import ReplicatedLinear
from gemray_workers.model.weight_sharding import WeightSharding, whole_tensor
from gemray_workers.parallel.communicator import Communicator

OnExperts = Callable[[Tensor], None]
"""Told of the experts [T, K] that a layer chose for its rows."""


class Router:
    """Chooses K experts for every row. Ranks agree because their inputs are bit-identical."""

    def __init__(self, prefix: str, model: ModelConfig, moe: MoEConfig, sharding: WeightSharding) -> None:
        self._prefix = prefix
        self._kernels = sharding.kernels
        self._top_k = moe.top_k
        self._projection = ReplicatedLinear(f"{prefix}.proj", model.hidden_size, moe.num_experts, sharding)
        self._scale_H = sharding.empty(model.hidden_size)
        self.norm = Norm(self._scale_H, model.rms_norm_eps, round_before_weight=True, factor=model.hidden_size**-0.5)
        """Norm of the residual stream: what `__call__` takes."""
        self._per_expert_scale_E = sharding.empty(moe.num_experts)
        self.on_experts: OnExperts | None = None
        """For measurements, in cycles that run kernel by kernel."""

    def __call__(self, z_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (compute dtype) and numbers of each row's experts, both [T, K]."""
        # Unrounded logits: close ones, rounded to 16 bits, would tie and pick other experts.
        logits_STE = self._projection.wide_summands(z_TH)
        weights_TK, experts_TK = self._kernels.route(logits_STE, self._per_expert_scale_E, self._top_k)
        if self.on_experts is not None:
            self.on_experts(experts_TK)
        return weights_TK, experts_TK

    def weight_targets(self) -> list[WeightTarget]:
        """Projection and the two learned scales."""
        return [
            *self._projection.weight_targets(),
            whole_tensor(f"{self._prefix}.scale", self._scale_H),
            whole_tensor(f"{self._prefix}.per_expert_scale", self._per_expert_scale_E),
        ]


class Experts:
    """The experts' gated MLPs. Every rank holds a slice of each expert."""

    def __init__(
        self, prefix: str, hidden_size: int, moe: MoEConfig, comm: Communicator, sharding: WeightSharding
    ) -> None:
        self._comm = comm
        self._weights = expert_weights(prefix, hidden_size, moe, sharding)

    def __call__(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [T, K, H] and the weights [T, K] that they are to be added with, the same on every rank.

        Where the sum is taken already, it is the only output: K = 1.
        """
        return self._weights.over_ranks(self._comm, x_TH, weights_TK, experts_TK)

    def weight_targets(self) -> list[WeightTarget]:
        """Every expert's weights."""
        return self._weights.weight_targets()
