"""Exact products in Triton, for any number of rows (`gemray_kernels.numerics`).

Shape legend: T rows, I inputs (of a gated layer: its width), H inputs of a gated layer, O outputs, S summands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.reference.exact_linear import check_leaves
from gemray_kernels.reference.layer_norms import total
from gemray_kernels.triton import gated_projection as fused
from gemray_kernels.triton.activation import gelu_tanh_and_mul, silu_and_mul
from gemray_kernels.triton.exact_gemm import fits, gemm_summands
from gemray_kernels.triton.exact_linear import exact_summands_in_tiles
from gemray_kernels.triton.exact_tiles import (
    FEW_ROWS,
    gemm_tile,
    gemm_tile_of_leaves,
    pointer_tile,
    streaming_leaves,
    streaming_tile,
)
from gemray_kernels.triton.gate import gelu_of_total_and_mul
from gemray_kernels.triton.linear import Gate, gated_linear_in_tiles
from gemray_kernels.triton.linear_tiles import gated_tile


def linear(x_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
    """As `gemray_kernels.reference.exact_linear.linear`."""
    check_leaves(x_TI.shape[1], leaves)
    if leaves > 1:
        return total(_parts(x_TI, weight_OI, leaves, torch.float32), x_TI.dtype)
    return _whole(x_TI, weight_OI, x_TI.dtype)[0]


def summands(x_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
    """As `gemray_kernels.reference.exact_linear.summands`."""
    check_leaves(x_TI.shape[1], leaves)
    return _parts(x_TI, weight_OI, leaves, x_TI.dtype if leaves == 1 else torch.float32)


def wide_summands(x_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
    """As `gemray_kernels.reference.exact_linear.wide_summands`."""
    check_leaves(x_TI.shape[1], leaves)
    return _parts(x_TI, weight_OI, leaves, torch.float32)


def gelu_linear(x_TH: Tensor, gate_up_2IH: Tensor, leaves: int) -> Tensor:
    """As `gemray_kernels.reference.exact_linear.gelu_linear`."""
    if _in_one_kernel(x_TH, leaves):
        return gated_linear_in_tiles(x_TH, gate_up_2IH, gated_tile(*gate_up_2IH.shape), Gate.GELU)
    return gelu_tanh_and_mul(linear(x_TH, gate_up_2IH, leaves))


def silu_linear(x_TH: Tensor, gate_up_2IH: Tensor, leaves: int) -> Tensor:
    """As `gemray_kernels.reference.exact_linear.silu_linear`."""
    if _in_one_kernel(x_TH, leaves):
        return gated_linear_in_tiles(x_TH, gate_up_2IH, gated_tile(*gate_up_2IH.shape), Gate.SILU)
    return silu_and_mul(linear(x_TH, gate_up_2IH, leaves))


def gated_projection(summands_STI: Tensor, factor_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
    """As `gemray_kernels.reference.exact_linear.gated_projection`."""
    _, num_rows, num_in = summands_STI.shape
    if leaves == 1 and 0 < num_rows <= fused.MOST_ROWS and num_in <= fused.MOST_INPUTS:
        return fused.gated_projection(summands_STI, factor_TI, weight_OI)
    return summands(gelu_of_total_and_mul(summands_STI, factor_TI), weight_OI, leaves)


def _in_one_kernel(x: Tensor, leaves: int) -> bool:
    """Whether the gate is applied where the product is summed, as one leaf; it rounds as two kernels round."""
    return leaves == 1 and x.dtype == torch.bfloat16 and 0 < len(x) <= FEW_ROWS


def _whole(x_TI: Tensor, weight_OI: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The only summand [1, T, O] of a product of one leaf."""
    num_rows, num_in = x_TI.shape
    if num_rows <= FEW_ROWS:
        tile = streaming_tile(num_rows, len(weight_OI), num_in, 1, x_TI.dtype)
        return exact_summands_in_tiles(x_TI, weight_OI, 1, tile, out_dtype)
    large = gemm_tile(num_rows)
    if fits(x_TI, weight_OI, 1, large):
        return gemm_summands(x_TI, weight_OI, 1, large, out_dtype)
    return exact_summands_in_tiles(x_TI, weight_OI, 1, pointer_tile(1, x_TI.dtype), out_dtype)


def _parts(x_TI: Tensor, weight_OI: Tensor, leaves: int, out_dtype: torch.dtype) -> Tensor:
    """Summands [S, T, O], as many as keep the device at work; `out_dtype` is float32 where there may be several."""
    num_rows, num_in = x_TI.shape
    if leaves == 1:
        return _whole(x_TI, weight_OI, out_dtype)
    if num_rows <= FEW_ROWS:
        together = streaming_leaves(num_rows, len(weight_OI), leaves)
        tile = streaming_tile(num_rows, len(weight_OI), num_in // leaves, together, x_TI.dtype)
        return exact_summands_in_tiles(x_TI, weight_OI, leaves, tile, out_dtype)
    large = gemm_tile_of_leaves(min(leaves, 4))
    if fits(x_TI, weight_OI, leaves, large):
        return gemm_summands(x_TI, weight_OI, leaves, large, out_dtype)
    tile = pointer_tile(2, x_TI.dtype)
    return exact_summands_in_tiles(x_TI, weight_OI, leaves, tile, out_dtype)
