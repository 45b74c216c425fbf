"""Linear layers, sharded over tensor-parallel ranks (Shoeybi et al., arXiv 1909.08053; spec 6.1).

None of them communicates: the caller all-reduces a row-parallel layer's partial sums where the reader sees it.

Shape legend: T rows, I inputs, O outputs (the local ones where the layer is sharded).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.model.placement import Part, Placement, sliced_tensor, whole_tensor


class ReplicatedLinear:
    """A linear layer that every rank computes in full."""

    def __init__(self, name: str, num_in: int, num_out: int, place: Placement) -> None:
        self.weight_OI = place.empty(num_out, num_in)
        self._name = name

    def __call__(self, x_TI: Tensor) -> Tensor:
        """``x · weightᵀ`` [T, O]."""
        return linear(x_TI, self.weight_OI)

    def weight_targets(self) -> list[WeightTarget]:
        """The layer's weight."""
        return [whole_tensor(f"{self._name}.weight", self.weight_OI)]


class ColumnParallelLinear:
    """One or several linear layers of the same input whose outputs are split over the ranks.

    Layers of the same input (query, key, value; gate, up) are stacked into one product.
    """

    def __init__(self, outputs: Sequence[tuple[str, Part]], num_in: int, place: Placement) -> None:
        """Layers of `num_in` inputs.

        Args:
            outputs: name of each layer on disk with this rank's part of its outputs.
            num_in: inputs, whole on every rank.
            place: where the weight lies.
        """
        self._outputs = tuple(outputs)
        self.sizes = [part.length for _, part in self._outputs]
        self.weight_OI = place.empty(sum(self.sizes), num_in)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """This rank's outputs [T, O], the layers' side by side in order."""
        return linear(x_TI, self.weight_OI)

    def weight_targets(self) -> list[WeightTarget]:
        """Each layer's weight."""
        blocks = torch.split(self.weight_OI, self.sizes)
        return [
            sliced_tensor(f"{name}.weight", 0, part, block)
            for (name, part), block in zip(self._outputs, blocks, strict=True)
        ]


class RowParallelLinear:
    """A linear layer whose inputs are split over the ranks: each rank computes one summand of the output."""

    def __init__(self, name: str, inputs: Part, num_out: int, place: Placement) -> None:
        self.weight_OI = place.empty(num_out, inputs.length)
        self._name = name
        self._inputs = inputs

    def partial_sum(self, x_TI: Tensor) -> Tensor:
        """This rank's summand [T, O]: the layer's output is the all-reduced sum of every rank's."""
        return linear(x_TI, self.weight_OI)

    def weight_targets(self) -> list[WeightTarget]:
        """The layer's weight."""
        return [sliced_tensor(f"{self._name}.weight", 1, self._inputs, self.weight_OI)]
