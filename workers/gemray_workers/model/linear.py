"""Linear layers, sharded over tensor-parallel ranks (Shoeybi et al., arXiv 1909.08053; spec 6.1).

None of them communicates: the caller all-reduces a row-parallel layer's partial sums where the reader sees it. How a
weight is held and multiplied is a method's matter (`model.linear_method`).

Shape legend: T rows, I inputs, O outputs (the local ones where the layer is sharded).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.model.linear_method import PLAIN, LinearMethod
from gemray_workers.model.placement import Part, Placement


class ReplicatedLinear:
    """A linear layer that every rank computes in full."""

    def __init__(self, name: str, num_in: int, num_out: int, place: Placement, *, method: LinearMethod = PLAIN) -> None:
        self._weight = method.whole(name, num_out, num_in, place)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """``x · weightᵀ`` [T, O]."""
        return self._weight.product(x_TI)

    def weight_targets(self) -> list[WeightTarget]:
        """The layer's weight."""
        return self._weight.weight_targets()


class ColumnParallelLinear:
    """One or several linear layers of the same input whose outputs are split over the ranks.

    Layers of the same input (query, key, value; gate, up) are stacked into one product.
    """

    def __init__(
        self, outputs: Sequence[tuple[str, Part]], num_in: int, place: Placement, *, method: LinearMethod = PLAIN
    ) -> None:
        """Layers of `num_in` inputs.

        Args:
            outputs: name of each layer on disk with this rank's part of its outputs.
            num_in: inputs, whole on every rank.
            place: where the weight lies.
            method: how it is held.
        """
        self.sizes = [part.length for _, part in outputs]
        self._weight = method.by_outputs(outputs, num_in, place)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """This rank's outputs [T, O], the layers' side by side in order."""
        return self._weight.product(x_TI)

    def weight_targets(self) -> list[WeightTarget]:
        """Each layer's weight."""
        return self._weight.weight_targets()


class RowParallelLinear:
    """A linear layer whose inputs are split over the ranks: each rank computes one summand of the output."""

    def __init__(
        self, name: str, inputs: Part, num_out: int, place: Placement, *, method: LinearMethod = PLAIN
    ) -> None:
        self._weight = method.by_inputs(name, inputs, num_out, place)

    def partial_sum(self, x_TI: Tensor) -> Tensor:
        """This rank's summand [T, O]: the layer's output is the all-reduced sum of every rank's."""
        return self._weight.product(x_TI)

    def weight_targets(self) -> list[WeightTarget]:
        """The layer's weight."""
        return self._weight.weight_targets()
