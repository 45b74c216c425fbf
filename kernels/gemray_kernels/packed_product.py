"""What a packed weight is asked for once a checkpoint has filled it.

Shape legend: T rows, I inputs, O outputs, S summands, H hidden size, K experts a row.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PackedProduct(Protocol):
    """Products with one weight; results are those of `gemray_kernels.reference.linear`."""

    def linear(self, x_TI: Tensor) -> Tensor:
        """``x · weightᵀ`` [T, O]."""
        ...

    def summands(self, x_TI: Tensor, first: int = 0) -> Tensor:
        """Parts [S, T, O - first] of the outputs from `first` on, whose sum in order of S is the product."""
        ...

    def wide_summands(self, x_TI: Tensor) -> Tensor:
        """Parts [S, T, O] of the product in the compute dtype, unrounded."""
        ...

    def gelu(self, x_TI: Tensor) -> Tensor:
        """The first half of the outputs gates the second by tanh-GELU [T, O / 2]."""
        ...

    def silu(self, x_TI: Tensor) -> Tensor:
        """The first half of the outputs gates the second by SiLU [T, O / 2]."""
        ...

    def gated_projection(self, summands_STI: Tensor, factor_TI: Tensor) -> Tensor:
        """Parts as of `summands` of the product of ``gelu_tanh(Σ summands) · factor``."""
        ...

    def comes_ahead(self, num_rows: int) -> bool:
        """Whether `summands` of so many rows ask for the weight before the rows are there: what writes them gains by
        letting them start early."""
        return False


class PackedExpertProducts(Protocol):
    """``down(gelu_tanh(gate(x)) · up(x))`` of every expert."""

    def outputs(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        """Outputs [T, K, H] of each row's experts."""
        ...

    def weighted_sum(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Sum [T, H] of each row's experts by their weights."""
        ...


class ExactExpertProducts(Protocol):
    """The same in exact numerics; results are those of `gemray_kernels.reference.exact_experts`."""

    def outputs(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        """Outputs [T, K, H] of each row's experts, rounded once."""
        ...

    def subtrees(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        """One rank's part of them [T, K, H], unrounded: to be added by the tree over ranks."""
        ...
