"""The weights of all experts of a layer, plain or packed: one rank's slice of each (spec 1.9, docs/quantized.md).

Shape legend: T rows, H hidden size, E experts, K experts a row, I local expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from gemray_kernels.packed_product import ExactExpertProducts, PackedExpertProducts
from gemray_kernels.table import ExactProducts, Kernels
from gemray_workers.checkpoint.quantized.formats import WeightFormat
from gemray_workers.checkpoint.quantized.recipe import Recipe
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.errors import InvalidField, Summary
from gemray_workers.model.config import MoEConfig
from gemray_workers.model.filled_products import FilledProducts
from gemray_workers.model.packed_linear import empty_packed, packed_targets
from gemray_workers.model.weight_sharding import Part, WeightSharding, slice_copy, sliced_tensor
from gemray_workers.parallel.communicator import Communicator


class ExpertWeights(Protocol):
    """Every expert's ``down(gelu_tanh(gate(x)) · up(x))``."""

    def over_ranks(
        self, comm: Communicator, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Outputs [T, K, H] of each row's experts and the weights [T, K] that they are to be added with.

        Both are the same on every rank. Where the sum is taken already, it is the only output: K = 1.
        """
        ...

    def weight_targets(self) -> list[WeightTarget]:
        """Every tensor that a checkpoint must fill."""
        ...


class FastExperts(ExpertWeights, Protocol):
    """Experts that each rank adds up before their parts are added over ranks: one output a row crosses."""

    def outputs(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        """Outputs [T, K, H] of each row's experts."""
        ...

    def weighted_sum(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Sum [T, H] of each row's experts by their weights."""
        ...

    @override
    def over_ranks(
        self, comm: Communicator, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        if comm.size == 1:
            return self.outputs(x_TH, experts_TK), weights_TK
        sum_TH = comm.all_reduce(self.weighted_sum(x_TH, weights_TK, experts_TK))
        return sum_TH.unsqueeze(1), torch.ones_like(weights_TK[:, :1])


def expert_weights(prefix: str, hidden_size: int, moe: MoEConfig, sharding: WeightSharding) -> ExpertWeights:
    """The weights of the experts named `prefix`, as the checkpoint's recipe says.

    Raises:
        InvalidField: a recipe that quantizes some of a layer's experts, or one of an expert's layers, otherwise than
            the others.
    """
    recipe = sharding.recipe
    if recipe is not None:
        prefix = prefix.removesuffix("experts") + recipe.experts_name
        gate_up, down = _formats(recipe, prefix, moe.num_experts)
        if gate_up is not None and down is not None:
            packed = PackedTensors(prefix, hidden_size, moe, sharding, recipe, gate_up, down)
            if (exact := sharding.kernels.exact) is not None:
                return PackedExactExperts(packed, exact)
            return PackedExperts(packed, sharding.kernels)
    each = recipe is not None and recipe.experts == "each"
    tensors = PlainTensors(prefix, hidden_size, moe, sharding, each=each)
    if (exact := sharding.kernels.exact) is not None:
        return PlainExactExperts(tensors, exact, sharding.leaves)
    return PlainExperts(tensors, sharding.kernels)


class PlainTensors:
    """One rank's slice of every expert, in the model's dtype."""

    def __init__(
        self, prefix: str, hidden_size: int, moe: MoEConfig, sharding: WeightSharding, *, each: bool = False
    ) -> None:
        """Place them; `each` tells of a checkpoint in which every expert has tensors of its own."""
        self._prefix = prefix
        self._each = each
        self._part = sharding.part(moe.intermediate_size)
        self.gate_up_E2IH = sharding.empty(moe.num_experts, 2 * self._part.length, hidden_size)
        """Gate halves above up halves."""
        self.down_EHI = sharding.empty(moe.num_experts, hidden_size, self._part.length)
        """The second layer."""

    def weight_targets(self) -> list[WeightTarget]:
        """Gate and up halves are sliced separately."""
        part = self._part
        gate, up = torch.split(self.gate_up_E2IH, part.length, dim=1)
        num_experts, _, hidden_size = self.gate_up_E2IH.shape
        if self._each:
            return [
                sliced_tensor(f"{self._prefix}.{number}.{name}.weight", dim, part, whole[number])
                for number in range(num_experts)
                for name, dim, whole in (("gate_proj", 0, gate), ("up_proj", 0, up), ("down_proj", 1, self.down_EHI))
            ]
        gate_up = WeightTarget(
            f"{self._prefix}.gate_up_proj",
            (num_experts, 2 * part.whole, hidden_size),
            (slice_copy(1, part, gate), slice_copy(1, part, up, offset=part.whole)),
        )
        return [gate_up, sliced_tensor(f"{self._prefix}.down_proj", 2, part, self.down_EHI)]


class PlainExperts(FastExperts):
    """Experts in the model's dtype."""

    def __init__(self, tensors: PlainTensors, kernels: Kernels) -> None:
        self._tensors = tensors
        self._kernels = kernels

    @override
    def outputs(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        return self._kernels.expert_outputs(x_TH, experts_TK, self._tensors.gate_up_E2IH, self._tensors.down_EHI)

    @override
    def weighted_sum(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        tensors = self._tensors
        return self._kernels.gated_experts(x_TH, weights_TK, experts_TK, tensors.gate_up_E2IH, tensors.down_EHI)

    @override
    def weight_targets(self) -> list[WeightTarget]:
        return self._tensors.weight_targets()


class ExactExperts(ExpertWeights, Protocol):
    """Experts in exact numerics: every output crosses on its own, unrounded, and is added by the tree over ranks."""

    def outputs(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        """Outputs [T, K, H] of each row's experts, rounded once."""
        ...

    def subtrees(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        """This rank's part of them [T, K, H], unrounded."""
        ...

    @override
    def over_ranks(
        self, comm: Communicator, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        if comm.size == 1:
            return self.outputs(x_TH, experts_TK), weights_TK
        own_TKH = self.subtrees(x_TH, experts_TK)
        return comm.all_reduce_tree(own_TKH.unsqueeze(0), x_TH.dtype), weights_TK


class PlainExactExperts(ExactExperts):
    """Experts in the model's dtype, in exact numerics."""

    def __init__(self, tensors: PlainTensors, products: ExactProducts, leaves: int) -> None:
        self._tensors = tensors
        self._products = products
        self._leaves = leaves

    @override
    def outputs(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        weights = (self._tensors.gate_up_E2IH, self._tensors.down_EHI)
        return self._products.expert_outputs(x_TH, experts_TK, *weights, self._leaves)

    @override
    def subtrees(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        weights = (self._tensors.gate_up_E2IH, self._tensors.down_EHI)
        return self._products.expert_subtrees(x_TH, experts_TK, *weights, self._leaves)

    @override
    def weight_targets(self) -> list[WeightTarget]:
        return self._tensors.weight_targets()


class PackedTensors:
    """One rank's slice of every expert, packed as on disk."""

    def __init__(
        self,
        prefix: str,
        hidden_size: int,
        moe: MoEConfig,
        sharding: WeightSharding,
        recipe: Recipe,
        gate_up: WeightFormat,
        down: WeightFormat,
    ) -> None:
        self._prefix = prefix
        self._stacked = recipe.experts == "stacked"
        self.leaves = sharding.leaves
        """Leaves of the second layer's inputs in exact numerics; those of the first are one."""
        self._part = sharding.part(moe.intermediate_size)
        self._hidden = Part(0, hidden_size, hidden_size)
        self._formats = gate_up, down
        modules = [prefix] if self._stacked else [f"{prefix}.{number}" for number in range(moe.num_experts)]
        gates = ("gate_up_proj",) if self._stacked else ("gate_proj", "up_proj")
        self.gate_up = empty_packed(
            recipe,
            gate_up,
            [f"{module}.{gate}" for module in modules for gate in gates],
            2 * self._part.length,
            self._hidden,
            sharding,
            moe.num_experts,
        )
        """Gate halves above up halves."""
        self.down = empty_packed(
            recipe,
            down,
            [f"{module}.down_proj" for module in modules],
            hidden_size,
            self._part,
            sharding,
            moe.num_experts,
            self.leaves,
        )
        """The second layer."""

    def weight_targets(self, then: Callable[[], None]) -> list[WeightTarget]:
        """Gate and up halves are sliced separately; `then` is called once a checkpoint has filled all of it."""
        targets = self._stacked_targets() if self._stacked else self._targets_of_each()
        return [replace(target, then=then) for target in targets]

    def _targets_of_each(self) -> Iterator[WeightTarget]:
        part, (gate_up_form, down_form) = self._part, self._formats
        for number in range(self.gate_up.num_experts):
            gate_up, down = self.gate_up.expert(number), self.down.expert(number)
            for name, row in (("gate_proj", 0), ("up_proj", part.length)):
                memory = gate_up.rows(row, part.length)
                yield from packed_targets(
                    f"{self._prefix}.{number}.{name}", gate_up_form, [(part, memory)], self._hidden
                )
            yield from packed_targets(f"{self._prefix}.{number}.down_proj", down_form, [(self._hidden, down)], part)

    def _stacked_targets(self) -> Iterator[WeightTarget]:
        part, (gate_up_form, down_form) = self._part, self._formats
        num_experts = self.gate_up.num_experts
        gate = replace(part, whole=2 * part.whole)
        up = replace(gate, start=part.whole + part.start)
        pieces = [(gate, self.gate_up.rows(0, part.length)), (up, self.gate_up.rows(part.length))]
        yield from packed_targets(f"{self._prefix}.gate_up_proj", gate_up_form, pieces, self._hidden, num_experts)
        yield from packed_targets(
            f"{self._prefix}.down_proj", down_form, [(self._hidden, self.down)], part, num_experts
        )


class PackedExperts(FastExperts):
    """Experts whose weights stay packed; they serve once a checkpoint has filled them."""

    def __init__(self, tensors: PackedTensors, kernels: Kernels) -> None:
        self._tensors = tensors
        self._products = FilledProducts[PackedExpertProducts](
            lambda: kernels.packed_experts(tensors.gate_up, tensors.down)
        )

    @override
    def outputs(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        return self._products.now.outputs(x_TH, experts_TK)

    @override
    def weighted_sum(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        return self._products.now.weighted_sum(x_TH, weights_TK, experts_TK)

    @override
    def weight_targets(self) -> list[WeightTarget]:
        return self._tensors.weight_targets(self._products.fill)


class PackedExactExperts(ExactExperts):
    """The same in exact numerics."""

    def __init__(self, tensors: PackedTensors, products: ExactProducts) -> None:
        self._tensors = tensors
        self._products = FilledProducts[ExactExpertProducts](
            lambda: products.packed_experts(tensors.gate_up, tensors.down, tensors.leaves)
        )

    @override
    def outputs(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        return self._products.now.outputs(x_TH, experts_TK)

    @override
    def subtrees(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        return self._products.now.subtrees(x_TH, experts_TK)

    @override
    def weight_targets(self) -> list[WeightTarget]:
        return self._tensors.weight_targets(self._products.fill)


def _formats(recipe: Recipe, prefix: str, num_experts: int) -> tuple[WeightFormat | None, WeightFormat | None]:
    """Formats of the experts' gate and up layers and of their down layers."""
    if recipe.experts == "plain":
        return None, None
    if recipe.experts == "stacked":
        gate_up, down = (recipe.format_of(f"{prefix}.{name}") for name in ("gate_up_proj", "down_proj"))
        found = {(gate_up, gate_up, down)}
    else:
        found = {
            (
                recipe.format_of(f"{prefix}.{number}.gate_proj"),
                recipe.format_of(f"{prefix}.{number}.up_proj"),
                recipe.format_of(f"{prefix}.{number}.down_proj"),
            )
            for number in range(num_experts)
        }
    formats = next(iter(found))
    if len(found) > 1 or formats[0] != formats[1] or (formats[0] is None) != (formats[2] is None):
        raise InvalidField(
            f"quantization_config of {prefix}",
            Summary("several formats"),
            "one format for all experts' gate and up layers, and one for their down layers, all quantized or none",
        )
    return formats[0], formats[2]
