"""Linear layers of 65 to 256 rows in fast numerics, for sm_90, such as a verify step has: weights are fetched once.

As in `exact_rows`, groups of four warps have pieces of 64 outputs and all rows, and a warp fetches tiles of both ahead.
Without leaves the inputs are cut wherever all multiprocessors end together. A thread holds two rows of every 16 of a
piece: outputs that lie side by side, which it stores as one number, or a gate's and its up row's. Weight rows are
fetched in that order, so that nothing is shared out anew.

Sums that one program leaves for another, so that tiles end in the middle of the inputs, and weights that come by way
of registers gained nothing (`benchmarks/results/2026-11-30-h200-bf16-rows`).

Shape legend: T rows, I inputs, H inputs of a gated layer, O outputs, S summands, U units of 16 weight rows, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gemray_kernels.triton import exact_pipeline
from gemray_kernels.triton.early_start import starts_early
from gemray_kernels.triton.gluon_ring import swizzled
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS
from gemray_kernels.triton.rows_pieces import (
    BLOCK_I,
    FETCH_REGISTERS,
    MULTIPLY_REGISTERS,
    PIECE,
    check_pieces,
    parts_of,
    stages_of,
)
from gemray_kernels.triton.verify_rows_kernel import UNIT, verify_rows_kernel


@dataclass(frozen=True)
class VerifyRowsTile:
    """What a program holds, and into how many parts the inputs are cut."""

    groups: int
    """Groups of four warps, 1 to 3, with 64 weight rows each."""
    width: int
    """Most rows: 16 to 256, a power of two or the sum of two from 16 on."""
    splits: int = 1

    def __post_init__(self) -> None:
        """Check what the kernel relies on.

        Raises:
            ValueError: a field is out of its range.
        """
        check_pieces(self.groups, self.width)
        if self.splits < 1:
            raise ValueError(f"splits {self.splits}: 1 or more are allowed")


def fits(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Whether the accelerator can address both: bfloat16 at multiples of 16 bytes, and a weight of whole units."""
    contiguous = x_TI.stride(1) == 1 and weight_OI.is_contiguous()
    return contiguous and exact_pipeline.fits(x_TI, weight_OI, 1) and len(weight_OI) % UNIT.value == 0


def verify_rows_linear(x_TI: Tensor, weight_OI: Tensor, tile: VerifyRowsTile, *, out_dtype: torch.dtype) -> Tensor:
    """Summands [S, T, O] of ``x · weightᵀ``: the product is their `total`.

    Args:
        x_TI: at least one row and no more than the tile's, as `fits` says.
        weight_OI: of the same dtype.
        tile: of this product.
        out_dtype: of the summands, bfloat16 or float32; float32 unless there is only one.

    Raises:
        ValueError: more rows than the tile has, or tensors that do not fit.
    """
    _check(x_TI, weight_OI, tile)
    out_STO = torch.empty(tile.splits, len(x_TI), len(weight_OI), dtype=out_dtype, device=x_TI.device)
    pairs_STP = out_STO.view(torch.int32 if out_dtype == torch.bfloat16 else torch.int64)
    _launch(x_TI, weight_OI, weight_OI.view(-1, 8, 2, weight_OI.shape[1]).transpose(1, 2), pairs_STP, tile, Gate.NONE)
    return out_STO


def verify_rows_gated(x_TH: Tensor, weight_2IH: Tensor, tile: VerifyRowsTile, gate: Gate) -> Tensor:
    """``act(x · gateᵀ) · (x · upᵀ)`` [T, I] of ``weight = [gate; up]``, rounded as separate kernels round.

    Args:
        x_TH: as for `verify_rows_linear`.
        weight_2IH: of the same dtype.
        tile: of this product, which is one part.
        gate: GELU or SILU.

    Raises:
        ValueError: as there, and for a tile of several parts.
    """
    if tile.splits != 1:
        raise ValueError(f"{tile} of a gated product: one part is allowed")
    _check(x_TH, weight_2IH, tile)
    out_STI = torch.empty(1, len(x_TH), len(weight_2IH) // 2, dtype=x_TH.dtype, device=x_TH.device)
    _launch(x_TH, weight_2IH, weight_2IH.view(2, -1, 8, weight_2IH.shape[1]).transpose(0, 1), out_STI, tile, gate)
    return out_STI[0]


def _check(x_TI: Tensor, weight_OI: Tensor, tile: VerifyRowsTile) -> None:
    if not 0 < len(x_TI) <= tile.width or not fits(x_TI, weight_OI) or x_TI.shape[1] != weight_OI.shape[1]:
        raise ValueError(
            f"x {list(x_TI.shape)} {x_TI.dtype} and weight {list(weight_OI.shape)} {weight_OI.dtype}: 1 to "
            f"{tile.width} rows of bfloat16 at multiples of 16 bytes and a contiguous weight of as many inputs and a "
            f"multiple of {UNIT.value} outputs are allowed"
        )


def _launch(
    x_TI: Tensor, weight_OI: Tensor, weight_U28I: Tensor, pairs_STP: Tensor, tile: VerifyRowsTile, gate: Gate
) -> None:
    num_rows, num_in = x_TI.shape
    first, second = parts_of(tile.width)
    tiles = triton.cdiv(len(weight_OI), PIECE.value * tile.groups) * tile.splits
    early = starts_early(x_TI)
    verify_rows_kernel[(min(tiles, MULTIPROCESSORS),)](
        TensorDescriptor.from_tensor(weight_U28I, [PIECE.value // 16, 2, 8, BLOCK_I.value], swizzled(128, rank=4)),
        TensorDescriptor.from_tensor(x_TI, [first, BLOCK_I.value], swizzled(128, rank=2)),
        TensorDescriptor.from_tensor(x_TI, [second or first, BLOCK_I.value], swizzled(128, rank=2)),
        pairs_STP,
        len(weight_OI) // 2,
        num_rows,
        tile.splits,
        triton.cdiv(num_in, BLOCK_I.value),
        tiles,
        GROUPS=tile.groups,
        PART_0=first,
        PART_1=second,
        STAGES=stages_of(tile.groups, tile.width),
        GATE=gate.value,
        EARLY=early,
        FETCH_REGISTERS=FETCH_REGISTERS,
        MULTIPLY_REGISTERS=MULTIPLY_REGISTERS[tile.groups],
        num_warps=4,
        launch_pdl=early,
    )
