"""A norm with its weight (spec 1.2)."""

from __future__ import annotations

from torch import Tensor

from gemray_kernels.reference.layer_norms import Norm
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.model.weight_sharding import WeightSharding, whole_tensor


class RMSNorm:
    """Root-mean-square norm over the last axis, the same on every rank."""

    def __init__(self, name: str, width: int, eps: float, sharding: WeightSharding) -> None:
        self.weight = sharding.empty(width)
        self._name = name
        self.norm = Norm(self.weight, eps)
        self._rms_norm = sharding.kernels.rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of `x` [..., width], in its dtype."""
        return self._rms_norm(x, self.weight, self.norm.eps)

    def weight_targets(self) -> list[WeightTarget]:
        """The norm's weight."""
        return [whole_tensor(f"{self._name}.weight", self.weight)]
