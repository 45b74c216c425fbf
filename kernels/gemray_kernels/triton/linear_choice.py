"""Which product serves a linear layer: tiles that stream the weight, or the library's.

Shape legend: T rows, I inputs (of a gated layer: its width), O outputs, S summands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.precision import compute_dtype, wide_linear
from gemray_kernels.triton.activation import gelu_tanh_and_mul, silu_and_mul
from gemray_kernels.triton.linear import MOST_ROWS, Gate, gated_linear_in_tiles, linear_in_tiles
from gemray_kernels.triton.linear_tiles import gated_tile, tile_of_summands, whole_tile


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.linear`."""
    tile = whole_tile(len(weight_OI)) if _are_few(x_TI) else None
    if tile is None:
        return torch.nn.functional.linear(x_TI, weight_OI)
    return linear_in_tiles(x_TI, weight_OI, tile, out_dtype=x_TI.dtype)[0]


def summands(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.summands`."""
    if not _are_few(x_TI):
        return torch.nn.functional.linear(x_TI, weight_OI).unsqueeze(0)
    tile = tile_of_summands(len(x_TI), *weight_OI.shape)
    return linear_in_tiles(x_TI, weight_OI, tile, out_dtype=x_TI.dtype if tile.splits == 1 else torch.float32)


def wide_summands(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.wide_summands`."""
    if not _are_few(x_TI):
        return wide_linear(x_TI, weight_OI).unsqueeze(0)
    tile = tile_of_summands(len(x_TI), *weight_OI.shape)
    return linear_in_tiles(x_TI, weight_OI, tile, out_dtype=compute_dtype(x_TI.dtype))


def gelu_linear(x_TH: Tensor, gate_up_2IH: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.gelu_linear`."""
    if not _are_few(x_TH):
        return gelu_tanh_and_mul(linear(x_TH, gate_up_2IH))
    return gated_linear_in_tiles(x_TH, gate_up_2IH, gated_tile(len(x_TH), len(gate_up_2IH)), Gate.GELU)


def silu_linear(x_TH: Tensor, gate_up_2IH: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.silu_linear`."""
    if not _are_few(x_TH):
        return silu_and_mul(linear(x_TH, gate_up_2IH))
    return gated_linear_in_tiles(x_TH, gate_up_2IH, gated_tile(len(x_TH), len(gate_up_2IH)), Gate.SILU)


def _are_few(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and 0 < x.shape[0] <= MOST_ROWS
