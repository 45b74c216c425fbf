"""Linear layers, sharded over tensor-parallel ranks (Shoeybi et al., arXiv 1909.08053; spec 6.1).

None of them communicates: the caller all-reduces a row-parallel layer's partial sums where the reader sees it. How a
weight is held and multiplied is a method's matter (`model.linear_method`).

Shape legend: T rows, I inputs, O outputs (the local ones where the layer is sharded), S summands.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.model.linear_method import LinearMethod
from gemray_workers.model.recipe_method import method_of
from gemray_workers.model.weight_sharding import Part, WeightSharding
from gemray_workers.parallel.communicator import Communicator


class ReplicatedLinear:
    """A linear layer that every rank computes in full."""

    def __init__(
        self, name: str, num_in: int, num_out: int, sharding: WeightSharding, *, method: LinearMethod | None = None
    ) -> None:
        self._weight = (method or method_of(sharding)).whole(name, num_out, num_in, sharding)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """``x · weightᵀ`` [T, O]."""
        return self._weight.product(x_TI)

    def summands(self, x_TI: Tensor, *, first: int = 0, length: int | None = None) -> Tensor:
        """Parts [S, T, O] of the same, or of `length` outputs from `first` on."""
        return self._weight.summands(x_TI, first, length)

    def wide_summands(self, x_TI: Tensor) -> Tensor:
        """Parts [S, T, O] of the same in the compute dtype, unrounded."""
        return self._weight.wide_summands(x_TI)

    def gated_summands(self, summands_STI: Tensor, factor_TI: Tensor) -> Tensor:
        """Parts [S, T, O] of the layer's output for ``gelu_tanh(Σ summands) · factor``."""
        return self._weight.gated_summands(summands_STI, factor_TI)

    def starts_at_once(self, num_rows: int) -> bool:
        """Whether the kernel before `summands` of so many rows is to let them start at once."""
        return self._weight.starts_at_once(num_rows)

    def weight_targets(self) -> list[WeightTarget]:
        """The layer's weight."""
        return self._weight.weight_targets()


class ColumnParallelLinear:
    """One or several linear layers of the same input whose outputs are split over the ranks.

    Layers of the same input (query, key, value; gate, up) are stacked into one product.
    """

    def __init__(
        self,
        outputs: Sequence[tuple[str, Part]],
        num_in: int,
        sharding: WeightSharding,
        *,
        method: LinearMethod | None = None,
    ) -> None:
        """Layers of `num_in` inputs.

        Args:
            outputs: name of each layer on disk with this rank's part of its outputs.
            num_in: inputs, whole on every rank.
            sharding: where the weight lies.
            method: how it is held; None is what the checkpoint's recipe says.
        """
        self.sizes = [part.length for _, part in outputs]
        self._weight = (method or method_of(sharding)).by_outputs(outputs, num_in, sharding)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """This rank's outputs [T, O], the layers' side by side in order."""
        return self._weight.product(x_TI)

    def summands(self, x_TI: Tensor, *, first: int = 0) -> Tensor:
        """Parts [S, T, O - first] of the outputs from `first` on."""
        return self._weight.summands(x_TI, first)

    def gelu(self, x_TI: Tensor) -> Tensor:
        """The gated product of a gate and an up layer: ``gelu_tanh(gate) · up`` [T, O / 2]."""
        return self._weight.gelu(x_TI)

    def silu(self, x_TI: Tensor) -> Tensor:
        """The gated product of a gate and an up layer: ``silu(gate) · up`` [T, O / 2]."""
        return self._weight.silu(x_TI)

    def starts_at_once(self, num_rows: int) -> bool:
        """Whether the kernel before `summands` of so many rows is to let them start at once."""
        return self._weight.starts_at_once(num_rows)

    def gate_starts_at_once(self, num_rows: int) -> bool:
        """Likewise of `gelu` and `silu`."""
        return self._weight.gate_starts_at_once(num_rows)

    def weight_targets(self) -> list[WeightTarget]:
        """Each layer's weight."""
        return self._weight.weight_targets()


class RowParallelLinear:
    """A linear layer whose inputs are split over the ranks: each rank computes one summand of the output."""

    def __init__(
        self, name: str, inputs: Part, num_out: int, sharding: WeightSharding, *, method: LinearMethod | None = None
    ) -> None:
        self._weight = (method or method_of(sharding)).by_inputs(name, inputs, num_out, sharding)
        self._is_exact = sharding.kernels.exact is not None

    def partial_sum(self, x_TI: Tensor) -> Tensor:
        """This rank's summand [T, O]: the layer's output is the all-reduced sum of every rank's."""
        return self._weight.product(x_TI)

    def summands(self, x_TI: Tensor, comm: Communicator) -> Tensor:
        """Parts [S, T, O] of the layer's output, the same on every rank of `comm`."""
        if comm.size == 1:
            return self._weight.summands(x_TI)
        if self._is_exact:
            return comm.all_reduce_tree(self._weight.wide_summands(x_TI), x_TI.dtype).unsqueeze(0)
        return comm.all_reduce(self.partial_sum(x_TI)).unsqueeze(0)

    def comes_ahead(self, num_rows: int, comm: Communicator) -> bool:
        """Whether `summands` of so many rows ask for the weight before the rows are there."""
        return comm.size == 1 and self._weight.comes_ahead(num_rows)

    def weight_targets(self) -> list[WeightTarget]:
        """The layer's weight."""
        return self._weight.weight_targets()
