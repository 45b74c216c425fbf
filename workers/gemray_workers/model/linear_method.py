"""How the weight of a linear layer is held and multiplied: plainly, here; quantized formats are other methods.

A method holds one rank's part of a weight, says what the checkpoint has to fill, and computes the product. The layers
in `model.linear` say which part that is.

Shape legend: T rows, I inputs, O outputs (the local ones where the layer is sharded), S summands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from typing_extensions import override

from gemray_kernels.numerics import leaves_of
from gemray_kernels.reference.activation import gelu_tanh_and_mul, silu_and_mul
from gemray_kernels.reference.linear import gelu_of_total_and_mul
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.model.plain_products import PlainProducts, plain_products
from gemray_workers.model.weight_sharding import (
    Part,
    WeightSharding,
    leaves_of_stack,
    sliced_tensor,
    stacked_tensors,
    whole_tensor,
)


class LinearWeight(Protocol):
    """One rank's part of a linear layer's weight."""

    def product(self, x_TI: Tensor) -> Tensor:
        """``x · weightᵀ`` [T, O], in the dtype of `x_TI`."""
        ...

    def wide_summands(self, x_TI: Tensor) -> Tensor:
        """Parts [S, T, O] of the product in the compute dtype, unrounded."""
        ...

    def summands(self, x_TI: Tensor, first: int = 0, length: int | None = None) -> Tensor:
        """Parts [S, T, O - first] of the outputs from `first` on, all or so many, whose `total` is the product."""
        ...

    def gated_summands(self, summands_STI: Tensor, factor_TI: Tensor) -> Tensor:
        """Parts [S, T, O] of the product of ``gelu_tanh(Σ summands) · factor``."""
        ...

    def gelu(self, x_TI: Tensor) -> Tensor:
        """The first half of the product gates the second by tanh-GELU [T, O / 2]."""
        ...

    def silu(self, x_TI: Tensor) -> Tensor:
        """The first half of the product gates the second by SiLU [T, O / 2]."""
        ...

    def comes_ahead(self, num_rows: int) -> bool:
        """Whether `summands` of so many rows ask for the weight before the rows are there."""
        return False

    def starts_at_once(self, num_rows: int) -> bool:
        """Whether the kernel before `summands` of so many rows is to let them start at once."""
        return False

    def gate_starts_at_once(self, num_rows: int) -> bool:
        """Likewise of `gelu` and `silu`."""
        return False

    def weight_targets(self) -> list[WeightTarget]:
        """Every tensor that a checkpoint must fill."""
        ...


class UnfusedWeight(LinearWeight, Protocol):
    """A weight whose product no kernel joins with a gate."""

    @override
    def gated_summands(self, summands_STI: Tensor, factor_TI: Tensor) -> Tensor:
        return self.product(gelu_of_total_and_mul(summands_STI, factor_TI)).unsqueeze(0)

    @override
    def gelu(self, x_TI: Tensor) -> Tensor:
        return gelu_tanh_and_mul(self.product(x_TI))

    @override
    def silu(self, x_TI: Tensor) -> Tensor:
        return silu_and_mul(self.product(x_TI))


class LinearMethod(Protocol):
    """Makes the weights of one format."""

    def whole(self, name: str, num_out: int, num_in: int, sharding: WeightSharding) -> LinearWeight:
        """A weight that every rank holds in full."""
        ...

    def by_outputs(self, outputs: Sequence[tuple[str, Part]], num_in: int, sharding: WeightSharding) -> LinearWeight:
        """A stack of layers of the same input, of each of which the rank holds a part of the outputs."""
        ...

    def by_inputs(self, name: str, inputs: Part, num_out: int, sharding: WeightSharding) -> LinearWeight:
        """A weight of which the rank holds a part of the inputs, so that `product` is a summand."""
        ...


class _PlainWeight(LinearWeight):
    def __init__(self, weight_OI: Tensor, targets: list[WeightTarget], products: PlainProducts) -> None:
        self._weight_OI = weight_OI
        self._targets = targets
        self._products = products

    @override
    def product(self, x_TI: Tensor) -> Tensor:
        return self._products.linear(x_TI, self._weight_OI)

    @override
    def wide_summands(self, x_TI: Tensor) -> Tensor:
        return self._products.wide_summands(x_TI, self._weight_OI)

    @override
    def summands(self, x_TI: Tensor, first: int = 0, length: int | None = None) -> Tensor:
        end = None if length is None else first + length
        return self._products.summands(x_TI, self._weight_OI[first:end])

    @override
    def gated_summands(self, summands_STI: Tensor, factor_TI: Tensor) -> Tensor:
        return self._products.gated_projection(summands_STI, factor_TI, self._weight_OI)

    @override
    def gelu(self, x_TI: Tensor) -> Tensor:
        return self._products.gelu_linear(x_TI, self._weight_OI)

    @override
    def silu(self, x_TI: Tensor) -> Tensor:
        return self._products.silu_linear(x_TI, self._weight_OI)

    @override
    def comes_ahead(self, num_rows: int) -> bool:
        return self._products.starts.comes_ahead(self._weight_OI, num_rows)

    @override
    def starts_at_once(self, num_rows: int) -> bool:
        return self._products.starts.at_once(self._weight_OI, num_rows)

    @override
    def gate_starts_at_once(self, num_rows: int) -> bool:
        return self._products.starts.gate_at_once(self._weight_OI, num_rows)

    @override
    def weight_targets(self) -> list[WeightTarget]:
        return list(self._targets)


class PlainMethod(LinearMethod):
    """One tensor a layer, ``NAME.weight``, in the model's dtype.

    In exact numerics a weight whose inputs ranks split has one leaf for each of the eight virtual shards, so that a
    rank holds an aligned subtree; how many leaves another weight has follows from its whole shape.
    """

    @override
    def whole(self, name: str, num_out: int, num_in: int, sharding: WeightSharding) -> LinearWeight:
        weight_OI = sharding.empty(num_out, num_in)
        products = plain_products(sharding.kernels, leaves_of(num_out, num_in))
        return _PlainWeight(weight_OI, [whole_tensor(f"{name}.weight", weight_OI)], products)

    @override
    def by_outputs(self, outputs: Sequence[tuple[str, Part]], num_in: int, sharding: WeightSharding) -> LinearWeight:
        weight_OI, targets = stacked_tensors(outputs, num_in, sharding)
        products = plain_products(sharding.kernels, leaves_of_stack(outputs, num_in))
        return _PlainWeight(weight_OI, targets, products)

    @override
    def by_inputs(self, name: str, inputs: Part, num_out: int, sharding: WeightSharding) -> LinearWeight:
        weight_OI = sharding.empty(num_out, inputs.length)
        products = plain_products(sharding.kernels, sharding.leaves)
        return _PlainWeight(weight_OI, [sliced_tensor(f"{name}.weight", 1, inputs, weight_OI)], products)


PLAIN = PlainMethod()
