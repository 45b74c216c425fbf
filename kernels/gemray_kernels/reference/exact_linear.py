"""Linear layers in exact numerics (`gemray_kernels.numerics`), by elementwise operations alone.

No library product is asked: which order it sums in follows the shapes of a call. Here each product of two numbers is an
element of a tensor and every sum adds two tensors of such elements, so that neither the rows nor the outputs beside an
output can change it.

Shape legend: T rows, I inputs (of a gated layer: its width), H inputs of a gated layer, O outputs, L inputs of a leaf,
S summands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.numerics import tree_sum
from gemray_kernels.precision import compute_dtype
from gemray_kernels.reference.activation import gelu_tanh, silu
from gemray_kernels.reference.apart import apart
from gemray_kernels.reference.layer_norms import total

MOST_PRODUCTS = 1 << 19
"""Products that are held at a time, a few MB."""


def linear(x_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
    """``x · weightᵀ`` [T, O], rounded once to `x`'s dtype.

    Args:
        x_TI: rows.
        weight_OI: of the same dtype.
        leaves: into which these inputs are cut, a power of two.

    Raises:
        ValueError: the inputs cannot be cut into so many leaves.
    """
    return tree_sum(wide_summands(x_TI, weight_OI, leaves)).to(x_TI.dtype)


def summands(x_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
    """Parts [S, T, O] whose sum by the tree, rounded once to `x`'s dtype, is `linear`.

    S is a power of two up to `leaves`. The parts are in the compute dtype, or rounded already where S is 1.
    """
    return wide_summands(x_TI, weight_OI, leaves)


def wide_summands(x_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
    """Parts [S, T, O] in the compute dtype whose sum by the tree is ``x · weightᵀ``, unrounded; S as in `summands`."""
    num_in = x_TI.shape[1]
    check_leaves(num_in, leaves)
    wide = compute_dtype(weight_OI.dtype)
    if x_TI.numel() * weight_OI.shape[0] <= MOST_PRODUCTS:
        return _leaves_at_once(x_TI.to(wide), weight_OI.to(wide), leaves)
    x_leaves, weight_leaves = (torch.split(matrix.to(wide), num_in // leaves, 1) for matrix in (x_TI, weight_OI))
    return torch.stack([_leaf(x_TL, weight_OL) for x_TL, weight_OL in zip(x_leaves, weight_leaves, strict=True)])


def gelu_linear(x_TH: Tensor, gate_up_2IH: Tensor, leaves: int) -> Tensor:
    """``gelu_tanh(gate(x)) · up(x)`` [T, I] of ``gate_up = [gate; up]``; both products are rounded first."""
    gate_TI, up_TI = linear(x_TH, gate_up_2IH, leaves).chunk(2, dim=-1)
    return gelu_tanh(apart(gate_TI)) * up_TI


def silu_linear(x_TH: Tensor, gate_up_2IH: Tensor, leaves: int) -> Tensor:
    """As `gelu_linear`, with SiLU."""
    gate_TI, up_TI = linear(x_TH, gate_up_2IH, leaves).chunk(2, dim=-1)
    return silu(apart(gate_TI)) * up_TI


def gated_projection(summands_STI: Tensor, factor_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
    """Parts as of `summands` of the product of ``gelu_tanh(Σ summands) · factor`` with a weight."""
    gate_TI = gelu_tanh(apart(total(summands_STI, factor_TI.dtype)))
    return summands(gate_TI * factor_TI, weight_OI, leaves)


def check_leaves(num_in: int, leaves: int) -> None:
    """Raise ValueError unless `num_in` inputs can be cut into so many leaves."""
    if leaves not in (1, 2, 4, 8) or num_in % leaves:
        raise ValueError(f"{leaves} leaves of {num_in} inputs: 1, 2, 4 or 8 that divide the inputs are allowed")


def sum_by_halves(products_L: Tensor) -> Tensor:
    """Sum over the first axis of [L, ...], which it overwrites: the second half is added to the first, an odd one out
    to the first of all."""
    left = products_L.shape[0]
    while left > 1:
        half = left // 2
        products_L[:half] += products_L[half : 2 * half]
        if left % 2:
            products_L[0] += products_L[left - 1]
        left = half
    return products_L[0].clone()


def _leaves_at_once(x_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
    """Every leaf's sum [S, T, O], each as `_leaf` adds it up, in fewer calls."""
    x_LST1 = x_TI.reshape(x_TI.shape[0], leaves, -1).permute(2, 1, 0).unsqueeze(-1)
    weight_LS1O = weight_OI.reshape(weight_OI.shape[0], leaves, -1).permute(2, 1, 0).contiguous().unsqueeze(2)
    return sum_by_halves(x_LST1 * weight_LS1O)


def _leaf(x_TL: Tensor, weight_OL: Tensor) -> Tensor:
    """``x · weightᵀ`` [T, O] of one leaf. Blocks of rows and outputs only bound the memory."""
    num_out, num_in = weight_OL.shape
    outputs = max(1, min(num_out, MOST_PRODUCTS // num_in))
    rows = max(1, MOST_PRODUCTS // (num_in * outputs))
    x_LT1 = x_TL.t().unsqueeze(-1)
    blocks = [weight_BL.t().contiguous().unsqueeze(1) for weight_BL in torch.split(weight_OL, outputs)]
    return torch.cat(
        [
            torch.cat([sum_by_halves(some_L1O * some_LT1) for some_L1O in blocks], dim=-1)
            for some_LT1 in torch.split(x_LT1, rows, dim=1)
        ]
    )
