"""Which product serves a linear layer: tiles that stream the weight, tiles of a verify step's rows, or the library's.

Shape legend: T rows, I inputs (of a gated layer: its width), O outputs, S summands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.precision import compute_dtype, wide_linear
from gemray_kernels.triton.activation import gelu_tanh_and_mul, silu_and_mul
from gemray_kernels.triton.early_start import on_hopper
from gemray_kernels.triton.linear import MOST_ROWS, Gate, gated_linear_in_tiles, linear_in_tiles
from gemray_kernels.triton.linear_tiles import gated_tile, tile_of_summands, whole_tile
from gemray_kernels.triton.rows_pieces import MOST_WIDTH
from gemray_kernels.triton.verify_rows import fits, verify_rows_gated, verify_rows_linear
from gemray_kernels.triton.verify_rows_tiles import gated_verify_tile, verify_tile_of_summands, whole_verify_tile


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.linear`."""
    if _are_few(x_TI):
        tile = whole_tile(len(weight_OI))
        if tile is not None:
            return linear_in_tiles(x_TI, weight_OI, tile, out_dtype=x_TI.dtype)[0]
    elif _may_verify(x_TI, weight_OI):
        verify = whole_verify_tile(len(x_TI), *weight_OI.shape)
        if verify is not None:
            return verify_rows_linear(x_TI, weight_OI, verify, out_dtype=x_TI.dtype)[0]
    return torch.nn.functional.linear(x_TI, weight_OI)


def summands(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.summands`."""
    if _are_few(x_TI):
        tile = tile_of_summands(len(x_TI), *weight_OI.shape)
        return linear_in_tiles(x_TI, weight_OI, tile, out_dtype=x_TI.dtype if tile.splits == 1 else torch.float32)
    if _may_verify(x_TI, weight_OI):
        verify = verify_tile_of_summands(len(x_TI), *weight_OI.shape)
        if verify is not None:
            out_dtype = x_TI.dtype if verify.splits == 1 else torch.float32
            return verify_rows_linear(x_TI, weight_OI, verify, out_dtype=out_dtype)
    return torch.nn.functional.linear(x_TI, weight_OI).unsqueeze(0)


def wide_summands(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.wide_summands`."""
    if not _are_few(x_TI):
        return wide_linear(x_TI, weight_OI).unsqueeze(0)
    tile = tile_of_summands(len(x_TI), *weight_OI.shape)
    return linear_in_tiles(x_TI, weight_OI, tile, out_dtype=compute_dtype(x_TI.dtype))


def gelu_linear(x_TH: Tensor, gate_up_2IH: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.gelu_linear`."""
    gated = _gated_in_one(x_TH, gate_up_2IH, Gate.GELU)
    return gelu_tanh_and_mul(linear(x_TH, gate_up_2IH)) if gated is None else gated


def silu_linear(x_TH: Tensor, gate_up_2IH: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.silu_linear`."""
    gated = _gated_in_one(x_TH, gate_up_2IH, Gate.SILU)
    return silu_and_mul(linear(x_TH, gate_up_2IH)) if gated is None else gated


def _gated_in_one(x_TH: Tensor, gate_up_2IH: Tensor, gate: Gate) -> Tensor | None:
    """The gated product where a kernel gates what it sums."""
    if _are_few(x_TH):
        return gated_linear_in_tiles(x_TH, gate_up_2IH, gated_tile(len(x_TH), len(gate_up_2IH)), gate)
    if _may_verify(x_TH, gate_up_2IH):
        verify = gated_verify_tile(len(x_TH), *gate_up_2IH.shape)
        if verify is not None:
            return verify_rows_gated(x_TH, gate_up_2IH, verify, gate)
    return None


def _are_few(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and 0 < x.shape[0] <= MOST_ROWS


def _may_verify(x_TI: Tensor, weight_OI: Tensor) -> bool:
    return MOST_ROWS < len(x_TI) <= MOST_WIDTH and on_hopper(x_TI) and fits(x_TI, weight_OI)
