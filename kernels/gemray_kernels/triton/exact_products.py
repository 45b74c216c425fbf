"""Exact products in Triton, for any number of rows (`gemray_kernels.numerics`).

Shape legend: T rows, I inputs (of a gated layer: its width), H inputs of a gated layer, O outputs, S summands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.reference.exact_linear import check_leaves
from gemray_kernels.reference.layer_norms import total
from gemray_kernels.triton import exact_gemm, exact_pipeline
from gemray_kernels.triton import gated_projection as fused
from gemray_kernels.triton.activation import gelu_tanh_and_mul, silu_and_mul
from gemray_kernels.triton.exact_linear import exact_summands_in_tiles
from gemray_kernels.triton.exact_rows import gated_rows, summands_of_rows
from gemray_kernels.triton.exact_rows_tiles import MOST_ROWS, gated_rows_tile, rows_tile
from gemray_kernels.triton.exact_tiles import (
    FEW_ROWS,
    gemm_tile,
    pipeline_beats_gemm,
    pipeline_tile,
    pointer_tile,
    streaming_tile,
)
from gemray_kernels.triton.gate import gelu_of_total_and_mul
from gemray_kernels.triton.linear import Gate, gated_linear_in_tiles
from gemray_kernels.triton.linear_tiles import gated_tile


def linear(x_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
    """As `gemray_kernels.reference.exact_linear.linear`."""
    check_leaves(x_TI.shape[1], leaves)
    parts_STO = _parts(x_TI, weight_OI, leaves, wide=False)
    return parts_STO[0] if len(parts_STO) == 1 else total(parts_STO, x_TI.dtype)


def summands(x_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
    """As `gemray_kernels.reference.exact_linear.summands`."""
    check_leaves(x_TI.shape[1], leaves)
    return _parts(x_TI, weight_OI, leaves, wide=False)


def wide_summands(x_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
    """As `gemray_kernels.reference.exact_linear.wide_summands`."""
    check_leaves(x_TI.shape[1], leaves)
    return _parts(x_TI, weight_OI, leaves, wide=True)


def gelu_linear(x_TH: Tensor, gate_up_2IH: Tensor, leaves: int) -> Tensor:
    """As `gemray_kernels.reference.exact_linear.gelu_linear`."""
    gated = _gated_in_one(x_TH, gate_up_2IH, leaves, Gate.GELU)
    return gelu_tanh_and_mul(linear(x_TH, gate_up_2IH, leaves)) if gated is None else gated


def silu_linear(x_TH: Tensor, gate_up_2IH: Tensor, leaves: int) -> Tensor:
    """As `gemray_kernels.reference.exact_linear.silu_linear`."""
    gated = _gated_in_one(x_TH, gate_up_2IH, leaves, Gate.SILU)
    return silu_and_mul(linear(x_TH, gate_up_2IH, leaves)) if gated is None else gated


def gated_projection(summands_STI: Tensor, factor_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
    """As `gemray_kernels.reference.exact_linear.gated_projection`."""
    _, num_rows, num_in = summands_STI.shape
    if leaves == 1 and 0 < num_rows <= fused.MOST_ROWS and num_in <= fused.MOST_INPUTS:
        return fused.gated_projection(summands_STI, factor_TI, weight_OI)
    return summands(gelu_of_total_and_mul(summands_STI, factor_TI), weight_OI, leaves)


def _gated_in_one(x_TH: Tensor, gate_up_2IH: Tensor, leaves: int, gate: Gate) -> Tensor | None:
    """The gated product where a kernel gates what it sums, as one leaf; it rounds as two kernels round."""
    num_rows = len(x_TH)
    if leaves != 1 or x_TH.dtype != torch.bfloat16:
        return None
    if 0 < num_rows <= FEW_ROWS:
        return gated_linear_in_tiles(x_TH, gate_up_2IH, gated_tile(num_rows, len(gate_up_2IH)), gate)
    if FEW_ROWS < num_rows <= MOST_ROWS and exact_pipeline.fits(x_TH, gate_up_2IH, leaves):
        return gated_rows(x_TH, gate_up_2IH, leaves, gated_rows_tile(num_rows, *gate_up_2IH.shape), gate)
    return None


def _parts(x_TI: Tensor, weight_OI: Tensor, leaves: int, *, wide: bool) -> Tensor:
    """Summands [S, T, O], as many as keep the device at work; a single one is rounded unless it is to be wide."""
    num_rows, num_in = x_TI.shape
    num_out = len(weight_OI)
    float32, dtype = torch.float32, x_TI.dtype
    if num_rows <= FEW_ROWS:
        tile = streaming_tile(num_rows, num_out, num_in, leaves, dtype)
    elif exact_pipeline.fits(x_TI, weight_OI, leaves):
        if num_rows <= MOST_ROWS:
            rows = rows_tile(num_rows, num_out, num_in // leaves, leaves)
            return summands_of_rows(x_TI, weight_OI, leaves, rows, float32 if wide or leaves > rows.leaves else dtype)
        large = gemm_tile(num_rows)
        if leaves == 1 and exact_gemm.fits(x_TI, weight_OI, large) and not pipeline_beats_gemm(num_rows, num_out):
            return exact_gemm.gemm(x_TI, weight_OI, large, float32 if wide else dtype).unsqueeze(0)
        pipeline = pipeline_tile(num_rows, num_out, leaves)
        out_dtype = float32 if wide or leaves > pipeline.leaves else dtype
        return exact_pipeline.pipelined_summands(x_TI, weight_OI, leaves, pipeline, out_dtype)
    else:
        tile = pointer_tile(min(leaves, 2), dtype)
    return exact_summands_in_tiles(x_TI, weight_OI, leaves, tile, float32 if wide or leaves > tile.leaves else dtype)
