"""Linear layers of a checkpoint of which some are quantized, as its recipe says.

Shape legend: T rows, I inputs, O outputs, S summands.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from typing_extensions import override

from gemray_kernels.reference.layer_norms import total
from gemray_workers.checkpoint.quantized.formats import WeightFormat
from gemray_workers.checkpoint.quantized.recipe import Recipe
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.model.linear_method import PLAIN, LinearMethod, LinearWeight, UnfusedWeight
from gemray_workers.model.packed_linear import packed_linear_weight
from gemray_workers.model.weight_sharding import Part, WeightSharding


def method_of(sharding: WeightSharding) -> LinearMethod:
    """How the layers of a checkpoint are held."""
    return PLAIN if sharding.recipe is None else RecipeMethod(sharding.recipe)


class RecipeMethod(LinearMethod):
    """Packed weights for the layers that a recipe names, plain ones for the others."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    @override
    def whole(self, name: str, num_out: int, num_in: int, sharding: WeightSharding) -> LinearWeight:
        form = self._recipe.format_of(name)
        if form is None:
            return PLAIN.whole(name, num_out, num_in, sharding)
        return packed_linear_weight(
            self._recipe, form, [(name, Part(0, num_out, num_out))], Part(0, num_in, num_in), sharding
        )

    @override
    def by_outputs(self, outputs: Sequence[tuple[str, Part]], num_in: int, sharding: WeightSharding) -> LinearWeight:
        weights = [
            self._of_one_format(form, list(run), num_in, sharding)
            for form, run in groupby(outputs, key=lambda output: self._recipe.format_of(output[0]))
        ]
        return weights[0] if len(weights) == 1 else _SideBySide(weights)

    @override
    def by_inputs(self, name: str, inputs: Part, num_out: int, sharding: WeightSharding) -> LinearWeight:
        form = self._recipe.format_of(name)
        if form is None:
            return PLAIN.by_inputs(name, inputs, num_out, sharding)
        return packed_linear_weight(self._recipe, form, [(name, Part(0, num_out, num_out))], inputs, sharding)

    def _of_one_format(
        self, form: WeightFormat | None, outputs: list[tuple[str, Part]], num_in: int, sharding: WeightSharding
    ) -> LinearWeight:
        if form is None:
            return PLAIN.by_outputs(outputs, num_in, sharding)
        return packed_linear_weight(self._recipe, form, outputs, Part(0, num_in, num_in), sharding)


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
