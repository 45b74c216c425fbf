"""Packed weights in exact numerics: their numbers, each rounded once, are multiplied as plain ones are.

So a packed weight has the bits of a plain one of the same numbers, and all that holds for that one (`exact_linear`,
`exact_experts`): scales go into numbers, never into sums, which ranks and programs cut. Numbers are made anew for each
product, elementwise: neither the group nor the word that a rank's part begins in changes them.

Shape legend: T rows, I inputs, H inputs of a gated layer, O outputs, S summands, K experts a row.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from gemray_kernels.packed_product import ExactExpertProducts, PackedProduct
from gemray_kernels.packed_weight import Code, PackedWeight, Tiling
from gemray_kernels.reference import exact_experts, exact_linear
from gemray_kernels.reference.packed_linear import dequantized


class LinearProducts(Protocol):
    """Exact products with plain weights, such as the module `exact_linear` has; the last argument is the leaves."""

    def linear(self, x_TI: Tensor, weight_OI: Tensor, leaves: int, /) -> Tensor:
        """``x · weightᵀ`` [T, O]."""
        ...

    def summands(self, x_TI: Tensor, weight_OI: Tensor, leaves: int, /) -> Tensor:
        """Parts of it [S, T, O]."""
        ...

    def wide_summands(self, x_TI: Tensor, weight_OI: Tensor, leaves: int, /) -> Tensor:
        """The same in the compute dtype."""
        ...

    def gelu_linear(self, x_TH: Tensor, gate_up_2IH: Tensor, leaves: int, /) -> Tensor:
        """The first half gates the second by tanh-GELU [T, I]."""
        ...

    def silu_linear(self, x_TH: Tensor, gate_up_2IH: Tensor, leaves: int, /) -> Tensor:
        """The first half gates the second by SiLU [T, I]."""
        ...

    def gated_projection(self, summands_STI: Tensor, factor_TI: Tensor, weight_OI: Tensor, leaves: int, /) -> Tensor:
        """Parts [S, T, O] of the product of ``gelu_tanh(Σ summands) · factor``."""
        ...


class ExpertProducts(Protocol):
    """Exact products with plain experts, such as the module `exact_experts` has."""

    def expert_outputs(
        self, x_TH: Tensor, experts_TK: Tensor, gate_up_E2IH: Tensor, down_EHI: Tensor, leaves: int, /
    ) -> Tensor:
        """Outputs [T, K, H], rounded once."""
        ...

    def expert_subtrees(
        self, x_TH: Tensor, experts_TK: Tensor, gate_up_E2IH: Tensor, down_EHI: Tensor, leaves: int, /
    ) -> Tensor:
        """A rank's part of them, unrounded."""
        ...


def no_tiling(
    code: Code, group: int, scale_dtype: torch.dtype, first: int, num_in: int, leaves: int, dtype: torch.dtype
) -> Tiling | None:
    """None: the reference reads weights as they lie on disk."""
    return None


def packed_product(weight: PackedWeight, leaves: int) -> PackedProduct:
    """The products with a weight whose inputs are cut into so many leaves."""
    return DequantizedProduct(weight, leaves, exact_linear)


def packed_experts(gate_up: PackedWeight, down: PackedWeight, leaves: int) -> ExactExpertProducts:
    """Experts whose second layer's inputs are cut into so many leaves."""
    return DequantizedExperts(gate_up, down, leaves, exact_experts)


class DequantizedProduct(PackedProduct):
    """Products with a weight that is unpacked for each of them."""

    def __init__(self, weight: PackedWeight, leaves: int, products: LinearProducts) -> None:
        """Products with `weight`, which is read at each of them, as `products` multiply plain ones."""
        self._weight = weight
        self._leaves = leaves
        self._products = products

    @override
    def linear(self, x_TI: Tensor) -> Tensor:
        return self._products.linear(x_TI, dequantized(self._weight, x_TI.dtype), self._leaves)

    @override
    def summands(self, x_TI: Tensor, first: int = 0) -> Tensor:
        return self._products.summands(x_TI, dequantized(self._weight.rows(first), x_TI.dtype), self._leaves)

    @override
    def wide_summands(self, x_TI: Tensor) -> Tensor:
        return self._products.wide_summands(x_TI, dequantized(self._weight, x_TI.dtype), self._leaves)

    @override
    def gelu(self, x_TI: Tensor) -> Tensor:
        return self._products.gelu_linear(x_TI, dequantized(self._weight, x_TI.dtype), self._leaves)

    @override
    def silu(self, x_TI: Tensor) -> Tensor:
        return self._products.silu_linear(x_TI, dequantized(self._weight, x_TI.dtype), self._leaves)

    @override
    def gated_projection(self, summands_STI: Tensor, factor_TI: Tensor) -> Tensor:
        weight_OI = dequantized(self._weight, factor_TI.dtype)
        return self._products.gated_projection(summands_STI, factor_TI, weight_OI, self._leaves)


class DequantizedExperts(ExactExpertProducts):
    """Experts whose weights are unpacked, all of them, for each call."""

    def __init__(self, gate_up: PackedWeight, down: PackedWeight, leaves: int, products: ExpertProducts) -> None:
        """Experts of these weights, which are read at each call, as `products` multiply plain ones."""
        self._gate_up = gate_up
        self._down = down
        self._leaves = leaves
        self._products = products

    @override
    def outputs(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        return self._products.expert_outputs(x_TH, experts_TK, *self._numbers(x_TH.dtype), self._leaves)

    @override
    def subtrees(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        return self._products.expert_subtrees(x_TH, experts_TK, *self._numbers(x_TH.dtype), self._leaves)

    def _numbers(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return dequantized(self._gate_up, dtype), dequantized(self._down, dtype)
