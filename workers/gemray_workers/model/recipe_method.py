"""Linear layers of a checkpoint of which some are quantized, as its recipe says.

Shape legend: T rows, I inputs, O outputs, S summands.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from typing_extensions import override

from gemray_kernels.numerics import leaves_of
from gemray_kernels.reference.activation import gelu_tanh, silu
from gemray_kernels.reference.apart import apart
from gemray_kernels.reference.layer_norms import total
from gemray_workers.checkpoint.quantized.formats import WeightFormat
from gemray_workers.checkpoint.quantized.recipe import Recipe
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.model.linear_method import PLAIN, LinearMethod, LinearWeight, UnfusedWeight
from gemray_workers.model.packed_linear import packed_linear_weight
from gemray_workers.model.weight_sharding import Part, WeightSharding, leaves_of_stack


def method_of(sharding: WeightSharding) -> LinearMethod:
    """How the layers of a checkpoint are held."""
    return PLAIN if sharding.recipe is None else RecipeMethod(sharding.recipe)


class RecipeMethod(LinearMethod):
    """Packed weights for the layers that a recipe names, plain ones for the others.

    How many leaves a weight has follows from its shape as it would for a plain one; fast numerics have no use for it.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    @override
    def whole(self, name: str, num_out: int, num_in: int, sharding: WeightSharding) -> LinearWeight:
        form = self._recipe.format_of(name)
        if form is None:
            return PLAIN.whole(name, num_out, num_in, sharding)
        outputs = [(name, Part(0, num_out, num_out))]
        leaves = leaves_of(num_out, num_in)
        return packed_linear_weight(self._recipe, form, outputs, Part(0, num_in, num_in), sharding, leaves)

    @override
    def by_outputs(self, outputs: Sequence[tuple[str, Part]], num_in: int, sharding: WeightSharding) -> LinearWeight:
        weights = [
            self._of_one_format(form, list(run), num_in, sharding)
            for form, run in groupby(outputs, key=lambda output: self._recipe.format_of(output[0]))
        ]
        if len(weights) == 1:
            return weights[0]
        return _SideBySide(weights) if sharding.kernels.exact is None else _ExactlySideBySide(weights)

    @override
    def by_inputs(self, name: str, inputs: Part, num_out: int, sharding: WeightSharding) -> LinearWeight:
        form = self._recipe.format_of(name)
        if form is None:
            return PLAIN.by_inputs(name, inputs, num_out, sharding)
        outputs = [(name, Part(0, num_out, num_out))]
        return packed_linear_weight(self._recipe, form, outputs, inputs, sharding, sharding.leaves)

    def _of_one_format(
        self, form: WeightFormat | None, outputs: list[tuple[str, Part]], num_in: int, sharding: WeightSharding
    ) -> LinearWeight:
        if form is None:
            return PLAIN.by_outputs(outputs, num_in, sharding)
        leaves = leaves_of_stack(outputs, num_in)
        return packed_linear_weight(self._recipe, form, outputs, Part(0, num_in, num_in), sharding, leaves)


class _SideBySide(UnfusedWeight):
    """Layers of the same input in several formats: one product each."""

    def __init__(self, weights: Sequence[LinearWeight]) -> None:
        self._weights = weights

    @override
    def product(self, x_TI: Tensor) -> Tensor:
        return torch.cat([weight.product(x_TI) for weight in self._weights], dim=-1)

    @override
    def wide_summands(self, x_TI: Tensor) -> Tensor:
        parts = [weight.wide_summands(x_TI) for weight in self._weights]
        return torch.cat([total(part_STO, part_STO.dtype) for part_STO in parts], dim=-1).unsqueeze(0)

    @override
    def summands(self, x_TI: Tensor, first: int = 0, length: int | None = None) -> Tensor:
        end = None if length is None else first + length
        return self.product(x_TI)[:, first:end].unsqueeze(0)

    @override
    def weight_targets(self) -> list[WeightTarget]:
        return [target for weight in self._weights for target in weight.weight_targets()]


class _ExactlySideBySide(_SideBySide):
    """The same with gates whose bits do not follow the rows beside a row."""

    @override
    def gated_summands(self, summands_STI: Tensor, factor_TI: Tensor) -> Tensor:
        gate_TI = gelu_tanh(apart(total(summands_STI, factor_TI.dtype)))
        return self.product(gate_TI * factor_TI).unsqueeze(0)

    @override
    def gelu(self, x_TI: Tensor) -> Tensor:
        gate_TI, up_TI = self.product(x_TI).chunk(2, dim=-1)
        return gelu_tanh(apart(gate_TI)) * up_TI

    @override
    def silu(self, x_TI: Tensor) -> Tensor:
        gate_TI, up_TI = self.product(x_TI).chunk(2, dim=-1)
        return silu(apart(gate_TI)) * up_TI
