"""Which product serves a linear layer: tiles that stream the weight, most of which ask for it before the rows are
there, or the library's.

Shape legend: T rows, I inputs (of a gated layer: its width), O outputs, S summands.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gemray_kernels.precision import compute_dtype, wide_linear
from gemray_kernels.product_starts import ProductStarts
from gemray_kernels.triton.activation import gelu_tanh_and_mul, silu_and_mul
from gemray_kernels.triton.ahead_tile import AheadTile
from gemray_kernels.triton.early_start import on_hopper
from gemray_kernels.triton.linear import MOST_ROWS, Gate, gated_linear_in_tiles, linear_in_tiles
from gemray_kernels.triton.linear_ahead import fits, gated_linear_ahead, linear_ahead
from gemray_kernels.triton.linear_tiles import (
    MOST_AT_ONCE,
    ahead_tile,
    gated_ahead_tile,
    gated_tile,
    tile_of_summands,
    whole_ahead_tile,
    whole_tile,
)


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.linear`."""
    tile = whole_tile(len(weight_OI)) if _are_few(x_TI) else None
    if tile is None:
        return torch.nn.functional.linear(x_TI, weight_OI)
    ahead = _chosen(whole_ahead_tile, x_TI, weight_OI)
    if ahead is not None:
        return linear_ahead(x_TI, weight_OI, ahead, out_dtype=x_TI.dtype, anchors=True)[0]
    return linear_in_tiles(x_TI, weight_OI, tile, out_dtype=x_TI.dtype)[0]


def summands(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.summands`."""
    tile = tile_of_summands(len(x_TI), *weight_OI.shape)
    dtype = x_TI.dtype if tile.splits == 1 else torch.float32
    ahead = _chosen(ahead_tile, x_TI, weight_OI)
    if ahead is not None:
        return linear_ahead(x_TI, weight_OI, ahead, out_dtype=dtype)
    if not _are_few(x_TI):
        return torch.nn.functional.linear(x_TI, weight_OI).unsqueeze(0)
    return linear_in_tiles(x_TI, weight_OI, tile, out_dtype=dtype)


def wide_summands(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.wide_summands`."""
    if not _are_few(x_TI):
        return wide_linear(x_TI, weight_OI).unsqueeze(0)
    dtype = compute_dtype(x_TI.dtype)
    ahead = _chosen(ahead_tile, x_TI, weight_OI)
    if ahead is not None:
        return linear_ahead(x_TI, weight_OI, ahead, out_dtype=dtype, anchors=True)
    return linear_in_tiles(x_TI, weight_OI, tile_of_summands(len(x_TI), *weight_OI.shape), out_dtype=dtype)


def gelu_linear(x_TH: Tensor, gate_up_2IH: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.gelu_linear`."""
    gated_TI = _gated(x_TH, gate_up_2IH, Gate.GELU)
    return gelu_tanh_and_mul(linear(x_TH, gate_up_2IH)) if gated_TI is None else gated_TI


def silu_linear(x_TH: Tensor, gate_up_2IH: Tensor) -> Tensor:
    """As `gemray_kernels.reference.linear.silu_linear`."""
    gated_TI = _gated(x_TH, gate_up_2IH, Gate.SILU)
    return silu_and_mul(linear(x_TH, gate_up_2IH)) if gated_TI is None else gated_TI


def _comes_ahead(weight_OI: Tensor, num_rows: int) -> bool:
    if num_rows == 0 or weight_OI.dtype != torch.bfloat16 or not on_hopper(weight_OI):
        return False
    return ahead_tile(num_rows, *weight_OI.shape) is not None


def _starts_at_once(weight_OI: Tensor, num_rows: int) -> bool:
    return num_rows <= MOST_AT_ONCE and _comes_ahead(weight_OI, num_rows)


def _gate_starts_at_once(gate_up_2IH: Tensor, num_rows: int) -> bool:
    return 0 < num_rows <= MOST_AT_ONCE and gate_up_2IH.dtype == torch.bfloat16 and on_hopper(gate_up_2IH)


STARTS = ProductStarts(comes_ahead=_comes_ahead, at_once=_starts_at_once, gate_at_once=_gate_starts_at_once)


def _gated(x_TH: Tensor, gate_up_2IH: Tensor, gate: Gate) -> Tensor | None:
    """The gated product; None of rows that are not few, whose gate is a kernel of its own."""
    ahead = _chosen(gated_ahead_tile, x_TH, gate_up_2IH)
    if ahead is not None:
        return gated_linear_ahead(x_TH, gate_up_2IH, ahead, gate)
    if not _are_few(x_TH):
        return None
    return gated_linear_in_tiles(x_TH, gate_up_2IH, gated_tile(len(x_TH), len(gate_up_2IH)), gate)


def _chosen(choose: Callable[[int, int, int], AheadTile | None], x_TI: Tensor, weight_OI: Tensor) -> AheadTile | None:
    """The tile of a product whose weight comes ahead; None where others are served."""
    if not len(x_TI) or x_TI.dtype != torch.bfloat16 or not on_hopper(x_TI) or not fits(x_TI, weight_OI):
        return None
    return choose(len(x_TI), *weight_OI.shape)


def _are_few(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and 0 < x.shape[0] <= MOST_ROWS
