"""Linear layers of 65 to 256 rows in exact numerics, for sm_90: every weight is fetched once, and no row is padded far.

There a product takes the matrix units about as long as the memory, so that neither may wait: tiles of 128 rows would
multiply 256 for 160. Each group of four warps has a piece of 64 outputs, and all have a tile's rows, in two parts that
are powers of two: 160 rows are 128 and 32. One warp fetches tiles of both, always some ahead. The order of every sum
is that of `gemray_kernels.triton.exact_linear`.

Rows cut into pieces in the place of outputs, sums that wait in memory for their neighbours of the tree, and weights
that are fetched before the rows may be read gained nothing (`benchmarks/results/2026-11-30-h200-exact-rows`).

Shape legend: T rows, L leaves, I inputs (beside L: of a leaf), H inputs of a gated layer, O outputs, S summands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gemray_kernels.triton.early_start import starts_early
from gemray_kernels.triton.exact_rows_kernel import BLOCK_I, PIECE, rows_kernel
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS

LEAST_PART = 16
MOST_WIDTH = 256
"""Columns of one product of wgmma, and of a tile."""
FETCH_REGISTERS = 24
MULTIPLY_REGISTERS = {1: 240, 2: 240, 3: 160}
"""Registers of a thread, by groups of warps: what the 65,536 of a multiprocessor leave."""


@dataclass(frozen=True)
class RowsTile:
    """What a program holds, and how many leaves it adds up: 1, 2, 4 or 8, whose waiting sums registers hold."""

    groups: int
    """Groups of four warps, 1 to 3, with 64 weight rows each."""
    width: int
    """Rows: 16 to 256, a power of two or the sum of two from 16 on."""
    num_stages: int
    leaves: int = 1

    def __post_init__(self) -> None:
        """Check what the kernel relies on.

        Raises:
            ValueError: a field is out of its range.
        """
        if self.groups not in MULTIPLY_REGISTERS:
            raise ValueError(f"groups {self.groups}: 1 to 3 are allowed")
        second = self.parts[1]
        if not LEAST_PART <= self.width <= MOST_WIDTH or second & (second - 1) or 0 < second < LEAST_PART:
            raise ValueError(f"width {self.width}: 16 to 256, one or two powers of two from 16 on, are allowed")
        if self.leaves not in (1, 2, 4, 8):
            raise ValueError(f"{self.leaves} leaves: 1, 2, 4 or 8 are allowed")

    @property
    def parts(self) -> tuple[int, int]:
        """The width's two powers of two, the second may be none."""
        first = 1 << (self.width.bit_length() - 1)
        return first, self.width - first


def summands_of_rows(x_TI: Tensor, weight_OI: Tensor, leaves: int, tile: RowsTile, out_dtype: torch.dtype) -> Tensor:
    """Summands [S, T, O] of ``x · weightᵀ``, aligned subtrees of ``tile.leaves`` leaves in order.

    Args:
        x_TI: at least one row, as `gemray_kernels.triton.exact_pipeline.fits` says. The accelerator puts zeros behind
            a leaf's end.
        weight_OI: of the same dtype.
        leaves: into which the inputs are cut.
        tile: its leaves divide `leaves`.
        out_dtype: of the summands; float32 unless there is only one.
    """
    out_STO = torch.empty(leaves // tile.leaves, len(x_TI), len(weight_OI), dtype=out_dtype, device=x_TI.device)
    _launch(x_TI, weight_OI, out_STO, leaves, tile, Gate.NONE)
    return out_STO


def gated_rows(x_TH: Tensor, weight_2IH: Tensor, leaves: int, tile: RowsTile, gate: Gate) -> Tensor:
    """``act(x · gateᵀ) · (x · upᵀ)`` [T, I] of ``weight = [gate; up]``, rounded as separate kernels round.

    Args:
        x_TH: as `summands_of_rows`.
        weight_2IH: of the same dtype.
        leaves: into which the inputs are cut.
        tile: which adds up all leaves.
        gate: GELU or SILU.
    """
    out_TI = torch.empty(len(x_TH), len(weight_2IH) // 2, dtype=x_TH.dtype, device=x_TH.device)
    _launch(x_TH, weight_2IH, out_TI.unsqueeze(0), leaves, tile, gate)
    return out_TI


def _launch(x_TI: Tensor, weight_OI: Tensor, out_STO: Tensor, leaves: int, tile: RowsTile, gate: Gate) -> None:
    splits, num_rows, num_out = out_STO.shape
    leaf = x_TI.shape[1] // leaves
    first, second = tile.parts
    x_TLI, weight_OLI = (matrix.view(len(matrix), leaves, leaf) for matrix in (x_TI, weight_OI))
    piece = PIECE.value if gate is Gate.NONE else PIECE.value // 2
    tiles = triton.cdiv(num_out, piece * tile.groups) * triton.cdiv(num_rows, tile.width) * splits
    early = starts_early(x_TI)
    rows_kernel[(min(tiles, MULTIPROCESSORS),)](
        _descriptor(weight_OLI, piece),
        _descriptor(x_TLI, first),
        _descriptor(x_TLI, second or first),
        out_STO,
        num_out,
        num_rows,
        splits,
        triton.cdiv(leaf, BLOCK_I.value),
        LEAVES=tile.leaves,
        GROUPS=tile.groups,
        PART_0=first,
        PART_1=second,
        STAGES=tile.num_stages,
        GATE=gate.value,
        EARLY=early,
        FETCH_REGISTERS=FETCH_REGISTERS,
        MULTIPLY_REGISTERS=MULTIPLY_REGISTERS[tile.groups],
        num_warps=4,
        launch_pdl=early,
    )


def _descriptor(matrix_XLI: Tensor, rows: int) -> TensorDescriptor:
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor.from_tensor(matrix_XLI, [rows, 1, BLOCK_I.value], swizzled)
