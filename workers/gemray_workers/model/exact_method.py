"""Linear layers in exact numerics: a row's output has the same bits beside any other rows and on any number of ranks.

A weight whose inputs ranks split has one leaf for each of the eight virtual shards, so that a rank holds an aligned
subtree; how many leaves another weight has follows from its whole shape (`gemray_kernels.numerics`).

Shape legend: T rows, I inputs, O outputs (the local ones where the layer is sharded), S summands.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from gemray_kernels.numerics import NUM_SHARDS, leaves_of
from gemray_kernels.table import ExactProducts
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.model.linear_method import LinearMethod, LinearWeight
from gemray_workers.model.weight_sharding import Part, WeightSharding, sliced_tensor, stacked_tensors, whole_tensor


class _ExactWeight(LinearWeight):
    def __init__(self, weight_OI: Tensor, targets: list[WeightTarget], products: ExactProducts, leaves: int) -> None:
        self._weight_OI = weight_OI
        self._targets = targets
        self._products = products
        self._leaves = leaves

    @override
    def product(self, x_TI: Tensor) -> Tensor:
        return self._products.linear(x_TI, self._weight_OI, self._leaves)

    @override
    def wide_summands(self, x_TI: Tensor) -> Tensor:
        return self._products.wide_summands(x_TI, self._weight_OI, self._leaves)

    @override
    def summands(self, x_TI: Tensor, first: int = 0, length: int | None = None) -> Tensor:
        end = None if length is None else first + length
        return self._products.summands(x_TI, self._weight_OI[first:end], self._leaves)

    @override
    def gated_summands(self, summands_STI: Tensor, factor_TI: Tensor) -> Tensor:
        return self._products.gated_projection(summands_STI, factor_TI, self._weight_OI, self._leaves)

    @override
    def gelu(self, x_TI: Tensor) -> Tensor:
        return self._products.gelu_linear(x_TI, self._weight_OI, self._leaves)

    @override
    def silu(self, x_TI: Tensor) -> Tensor:
        return self._products.silu_linear(x_TI, self._weight_OI, self._leaves)

    @override
    def weight_targets(self) -> list[WeightTarget]:
        return list(self._targets)


class ExactMethod(LinearMethod):
    """One tensor a layer, ``NAME.weight``, in the model's dtype."""

    def __init__(self, products: ExactProducts) -> None:
        self._products = products

    @override
    def whole(self, name: str, num_out: int, num_in: int, sharding: WeightSharding) -> LinearWeight:
        weight_OI = sharding.empty(num_out, num_in)
        targets = [whole_tensor(f"{name}.weight", weight_OI)]
        return _ExactWeight(weight_OI, targets, self._products, leaves_of(num_out, num_in))

    @override
    def by_outputs(self, outputs: Sequence[tuple[str, Part]], num_in: int, sharding: WeightSharding) -> LinearWeight:
        weight_OI, targets = stacked_tensors(outputs, num_in, sharding)
        leaves = leaves_of(sum(part.whole for _, part in outputs), num_in)
        return _ExactWeight(weight_OI, targets, self._products, leaves)

    @override
    def by_inputs(self, name: str, inputs: Part, num_out: int, sharding: WeightSharding) -> LinearWeight:
        weight_OI = sharding.empty(num_out, inputs.length)
        targets = [sliced_tensor(f"{name}.weight", 1, inputs, weight_OI)]
        return _ExactWeight(weight_OI, targets, self._products, NUM_SHARDS // sharding.size)
