"""Which kernel serves a product with a packed weight: for a single row and four bits one that multiplies sums with
scales (but for whole products of many outputs), for few rows tiles that stream it, some of which ask for it before the
rows are there, for more of them tiles that warps fetch and multiply side by side, whose work programs share where rows
are not too many, for many larger ones or the library's.

Shape legend: T rows, I inputs, O outputs, S summands.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from gemray_kernels.packed_product import PackedProduct
from gemray_kernels.packed_tiles import TiledWeight, laid_out, tiling_of
from gemray_kernels.packed_weight import Code, PackedWeight, Tiling
from gemray_kernels.precision import wide_linear
from gemray_kernels.reference.layer_norms import total
from gemray_kernels.reference.packed_linear import ReferenceProduct
from gemray_kernels.triton.activation import gelu_tanh_and_mul, silu_and_mul
from gemray_kernels.triton.gate import gelu_of_total_and_mul
from gemray_kernels.triton.linear import MOST_ROWS, Gate
from gemray_kernels.triton.packed_ahead import packed_gated_linear_ahead, packed_linear_ahead
from gemray_kernels.triton.packed_columns import packed_gated_linear_in_columns, packed_linear_in_columns
from gemray_kernels.triton.packed_columns_choice import columns_tile, gated_columns_tile
from gemray_kernels.triton.packed_dequantize import dequantized
from gemray_kernels.triton.packed_even import packed_even_gated_linear, packed_even_linear
from gemray_kernels.triton.packed_even_choice import MOST_SPLITS, Product, even_tile, gated_even_tile
from gemray_kernels.triton.packed_linear import PackedTile, packed_gated_linear_in_tiles, packed_linear_in_tiles
from gemray_kernels.triton.packed_prompts import fits, packed_prompt_linear
from gemray_kernels.triton.packed_tile_choice import (
    PROMPT_SPLITS,
    ahead_tile,
    gated_ahead_tile,
    gated_tile,
    gated_verify_tile,
    prompt_tile,
    tile_of_summands,
    verify_tile,
    whole_tile,
)
from gemray_kernels.triton.packed_verify import packed_verify_gated_linear, packed_verify_linear


def tiling(
    code: Code, group: int, scale_dtype: torch.dtype, first: int, num_in: int, dtype: torch.dtype
) -> Tiling | None:
    """How a weight is laid out for rows of `dtype`: `gemray_kernels.packed_tiles.tiling_of` for bfloat16."""
    return tiling_of(code, group, scale_dtype, first, num_in) if dtype == torch.bfloat16 else None


def packed_product(weight: PackedWeight, *, on_hopper: bool = True) -> PackedProduct:
    """The products with a weight, which is laid out anew in its memory where it has a tiling.

    Args:
        weight: whose products they are.
        on_hopper: of compute capability 9.0, whose instructions the products of many rows are written in.
    """
    if weight.tiling is None:
        return ReferenceProduct(weight)
    return TiledProduct(laid_out(weight, weight.tiling), on_hopper=on_hopper)


class TiledProduct(PackedProduct):
    """Products with a weight that is laid out in units; rows are bfloat16."""

    def __init__(self, weight: TiledWeight, *, on_hopper: bool = True) -> None:
        self._weight = weight
        self._on_hopper = on_hopper

    @override
    def linear(self, x_TI: Tensor) -> Tensor:
        if not _are_few(x_TI):
            return self._of_many_rows(x_TI)
        if self._weight.num_out < _ENOUGH_OUTPUTS:
            return total(self.summands(x_TI), x_TI.dtype)
        return packed_linear_in_tiles(x_TI, self._weight, whole_tile(self._weight), out_dtype=x_TI.dtype)[0]

    @override
    def summands(self, x_TI: Tensor, first: int = 0) -> Tensor:
        if not _are_few(x_TI):
            return self._summands_of_many_rows(x_TI, first)
        tile = tile_of_summands(self._weight, self._weight.num_out - first, x_TI.shape[0])
        dtype = x_TI.dtype if tile.splits == 1 else torch.float32
        return self._summands_of_few_rows(x_TI, tile, dtype, first)

    @override
    def comes_ahead(self, num_rows: int) -> bool:
        weight = self._weight
        tiles = (choose(weight, weight.num_out, num_rows) for choose in (columns_tile, ahead_tile))
        return self._on_hopper and any(tile is not None for tile in tiles)

    @override
    def wide_summands(self, x_TI: Tensor) -> Tensor:
        if not _are_few(x_TI):
            return self._summands_of_many_rows(x_TI, 0, wide=True)
        tile = tile_of_summands(self._weight, self._weight.num_out, x_TI.shape[0])
        return self._summands_of_few_rows(x_TI, tile, torch.float32)

    @override
    def gelu(self, x_TI: Tensor) -> Tensor:
        if _are_few(x_TI):
            return self._gated_few_rows(x_TI, Gate.GELU)
        gated_TI = self._gated_evenly(x_TI, Gate.GELU)
        return gelu_tanh_and_mul(self._of_many_rows(x_TI)) if gated_TI is None else gated_TI

    @override
    def silu(self, x_TI: Tensor) -> Tensor:
        if _are_few(x_TI):
            return self._gated_few_rows(x_TI, Gate.SILU)
        gated_TI = self._gated_evenly(x_TI, Gate.SILU)
        return silu_and_mul(self._of_many_rows(x_TI)) if gated_TI is None else gated_TI

    @override
    def gated_projection(self, summands_STI: Tensor, factor_TI: Tensor) -> Tensor:
        return self.summands(gelu_of_total_and_mul(summands_STI, factor_TI))

    def _summands_of_few_rows(self, x_TI: Tensor, tile: PackedTile, dtype: torch.dtype, first: int = 0) -> Tensor:
        weight = self._weight
        if self._on_hopper and fits(x_TI, weight, first):
            columns = columns_tile(weight, weight.num_out - first, len(x_TI))
            if columns is not None:
                return packed_linear_in_columns(x_TI, weight, columns, out_dtype=dtype, first=first)
            ahead = ahead_tile(weight, weight.num_out - first, len(x_TI))
            if ahead is not None:
                return packed_linear_ahead(x_TI, weight, ahead, out_dtype=dtype, first=first)
            verify = verify_tile(weight, weight.num_out - first, len(x_TI))
            if verify is not None:
                return packed_verify_linear(x_TI, weight, verify, out_dtype=dtype, first=first)
        return packed_linear_in_tiles(x_TI, weight, tile, out_dtype=dtype, first=first)

    def _gated_few_rows(self, x_TI: Tensor, gate: Gate) -> Tensor:
        weight = self._weight
        if self._on_hopper and fits(x_TI, weight, weight.num_out // 2):
            columns = gated_columns_tile(weight, len(x_TI))
            if columns is not None:
                return packed_gated_linear_in_columns(x_TI, weight, columns, gate)
            ahead = gated_ahead_tile(weight, len(x_TI))
            if ahead is not None:
                return packed_gated_linear_ahead(x_TI, weight, ahead, gate)
            verify = gated_verify_tile(weight, len(x_TI))
            if verify is not None:
                return packed_verify_gated_linear(x_TI, weight, verify, gate)
        return packed_gated_linear_in_tiles(x_TI, weight, gated_tile(weight, len(x_TI)), gate)

    def _gated_evenly(self, x_TI: Tensor, gate: Gate) -> Tensor | None:
        """Gated products of rows of which there are not too many; None where others are served."""
        weight = self._weight
        if not (self._on_hopper and len(x_TI) and fits(x_TI, weight, weight.num_out // 2)):
            return None
        tile = gated_even_tile(self._with_outputs(weight.num_out), len(x_TI))
        return None if tile is None else packed_even_gated_linear(x_TI, weight, tile, gate)

    def _of_many_rows(self, x_TI: Tensor) -> Tensor:
        return self._summands_of_many_rows(x_TI, 0, most_splits=1)[0]

    def _summands_of_many_rows(
        self, x_TI: Tensor, first: int, *, most_splits: int = PROMPT_SPLITS, wide: bool = False
    ) -> Tensor:
        weight = self._weight
        if not (self._on_hopper and len(x_TI) and fits(x_TI, weight, first)):
            numbers_OI = dequantized(weight, first)
            return (wide_linear if wide else torch.nn.functional.linear)(x_TI, numbers_OI).unsqueeze(0)
        num_out = weight.num_out - first
        even = even_tile(self._with_outputs(num_out), len(x_TI), most_splits=MOST_SPLITS if most_splits > 1 else 1)
        if even is not None:
            dtype = torch.float32 if wide or even.splits > 1 else x_TI.dtype
            return packed_even_linear(x_TI, weight, even, out_dtype=dtype, first=first)
        tile = prompt_tile(weight.code, num_out, weight.num_in, len(x_TI), most_splits=most_splits)
        dtype = torch.float32 if wide or tile.splits > 1 else x_TI.dtype
        return packed_prompt_linear(x_TI, weight, tile, out_dtype=dtype, first=first)

    def _with_outputs(self, num_out: int) -> Product:
        return Product(self._weight.code, self._weight.scaling, num_out, self._weight.num_in)


_ENOUGH_OUTPUTS = 4096
"""Fewer make too few programs unless their inputs are split."""


def _are_few(x: Tensor) -> bool:
    return 0 < x.shape[0] <= MOST_ROWS
