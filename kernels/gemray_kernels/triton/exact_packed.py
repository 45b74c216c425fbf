"""Packed weights in exact numerics on Hopper: their numbers are written down and multiplied as plain ones are."""

from __future__ import annotations

from gemray_kernels.packed_product import ExactExpertProducts, PackedProduct
from gemray_kernels.packed_weight import PackedWeight
from gemray_kernels.reference.exact_packed import DequantizedExperts, DequantizedProduct
from gemray_kernels.triton import exact_experts, exact_products


def packed_product(weight: PackedWeight, leaves: int) -> PackedProduct:
    """As `gemray_kernels.reference.exact_packed.packed_product`."""
    return DequantizedProduct(weight, leaves, exact_products)


def packed_experts(gate_up: PackedWeight, down: PackedWeight, leaves: int) -> ExactExpertProducts:
    """As `gemray_kernels.reference.exact_packed.packed_experts`."""
    return DequantizedExperts(gate_up, down, leaves, exact_experts)
