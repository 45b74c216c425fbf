"""Packed weights in exact numerics on Hopper: few rows stream them, prompts make numbers as they multiply, and where
that takes too many parts, numbers are written down once.

Either way they are multiplied as plain weights of the same numbers are (`gemray_kernels.triton.exact_products`).

Shape legend: T rows, I inputs, O outputs, S summands.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from gemray_kernels.packed_product import ExactExpertProducts, PackedProduct
from gemray_kernels.packed_tiles import TiledWeight, exact_tiling_of, laid_out
from gemray_kernels.packed_weight import Code, PackedWeight, Tiling
from gemray_kernels.reference.exact_packed import DequantizedExperts, DequantizedProduct
from gemray_kernels.reference.layer_norms import total
from gemray_kernels.triton import exact_experts, exact_products
from gemray_kernels.triton.activation import gelu_tanh_and_mul, silu_and_mul
from gemray_kernels.triton.exact_packed_ahead import exact_packed_gated_ahead, exact_packed_summands_ahead
from gemray_kernels.triton.exact_packed_experts import TiledExactExperts
from gemray_kernels.triton.exact_packed_linear import exact_packed_gated, exact_packed_summands
from gemray_kernels.triton.exact_packed_tiles import (
    ahead_tile,
    few_rows_tile,
    gated_ahead_tile,
    gated_tile,
    prompt_tile,
    takes_prompts,
)
from gemray_kernels.triton.exact_tiles import FEW_ROWS
from gemray_kernels.triton.factor_parts import with_parts
from gemray_kernels.triton.gate import gelu_of_total_and_mul
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_dequantize import dequantized
from gemray_kernels.triton.packed_prompts import fits, packed_prompt_linear


def tiling(
    code: Code, group: int, scale_dtype: torch.dtype, first: int, num_in: int, leaves: int, dtype: torch.dtype
) -> Tiling | None:
    """How a weight is laid out for rows of `dtype`: `exact_tiling_of` for bfloat16."""
    return exact_tiling_of(code, group, scale_dtype, first, num_in, leaves) if dtype == torch.bfloat16 else None


def packed_product(weight: PackedWeight, leaves: int) -> PackedProduct:
    """As `gemray_kernels.reference.exact_packed.packed_product`, of a weight that is laid out where it has a tiling."""
    if weight.tiling is None:
        return DequantizedProduct(weight, leaves, exact_products)
    return TiledExactProduct(laid_out(weight, weight.tiling))


def packed_experts(gate_up: PackedWeight, down: PackedWeight, leaves: int) -> ExactExpertProducts:
    """As `gemray_kernels.reference.exact_packed.packed_experts`, laid out where both weights have a tiling."""
    if gate_up.tiling is None or down.tiling is None:
        return DequantizedExperts(gate_up, down, leaves, exact_experts)
    return TiledExactExperts(laid_out(gate_up, gate_up.tiling), laid_out(down, down.tiling))


class TiledExactProduct(PackedProduct):
    """Products with a weight that is laid out in units, leaf by leaf; rows are bfloat16."""

    def __init__(self, weight: TiledWeight) -> None:
        self._weight = with_parts(weight)

    @override
    def linear(self, x_TI: Tensor) -> Tensor:
        parts_STO = self._parts(x_TI, wide=False)
        return parts_STO[0] if len(parts_STO) == 1 else total(parts_STO, x_TI.dtype)

    @override
    def summands(self, x_TI: Tensor, first: int = 0) -> Tensor:
        return self._parts(x_TI, wide=False, first=first)

    @override
    def wide_summands(self, x_TI: Tensor) -> Tensor:
        return self._parts(x_TI, wide=True)

    @override
    def gelu(self, x_TI: Tensor) -> Tensor:
        if self._in_one_kernel(x_TI):
            return self._gated(x_TI, Gate.GELU)
        return gelu_tanh_and_mul(self.linear(x_TI))

    @override
    def silu(self, x_TI: Tensor) -> Tensor:
        if self._in_one_kernel(x_TI):
            return self._gated(x_TI, Gate.SILU)
        return silu_and_mul(self.linear(x_TI))

    @override
    def gated_projection(self, summands_STI: Tensor, factor_TI: Tensor) -> Tensor:
        return self.summands(gelu_of_total_and_mul(summands_STI, factor_TI))

    def _in_one_kernel(self, x: Tensor) -> bool:
        """Whether the gate is applied where the product is summed, as one leaf; it rounds as two kernels round."""
        return self._weight.leaves == 1 and 0 < len(x) <= FEW_ROWS

    def _gated(self, x_TH: Tensor, gate: Gate) -> Tensor:
        weight = self._weight
        ahead = gated_ahead_tile(weight, len(x_TH))
        if ahead is not None and fits(x_TH, weight, weight.num_out // 2):
            return exact_packed_gated_ahead(x_TH, weight, ahead, gate)
        return exact_packed_gated(x_TH, weight, gated_tile(weight, len(x_TH)), gate)

    def _parts(self, x_TI: Tensor, *, wide: bool, first: int = 0) -> Tensor:
        """Summands [S, T, O], as many as keep the device at work; a single one is rounded unless it is to be wide."""
        weight = self._weight
        num_out = weight.num_out - first
        fitting = len(x_TI) > 0 and fits(x_TI, weight, first)
        if len(x_TI) > FEW_ROWS:
            if fitting and takes_prompts(weight, len(x_TI)):
                prompt = prompt_tile(weight, len(x_TI), num_out)
                dtype = torch.float32 if wide or weight.leaves > 1 else x_TI.dtype
                return packed_prompt_linear(x_TI, weight, prompt, out_dtype=dtype, first=first, exact=True)
            multiply = exact_products.wide_summands if wide else exact_products.summands
            return multiply(x_TI, dequantized(weight, first), weight.leaves)
        ahead = ahead_tile(weight, len(x_TI), num_out)
        if ahead is not None and fitting:
            dtype = torch.float32 if wide or weight.leaves > 1 else x_TI.dtype
            return exact_packed_summands_ahead(x_TI, weight, ahead, out_dtype=dtype, first=first)
        tile = few_rows_tile(weight, len(x_TI), num_out)
        dtype = torch.float32 if wide or weight.leaves > tile.leaves else x_TI.dtype
        return exact_packed_summands(x_TI, weight, tile, out_dtype=dtype, first=first)
