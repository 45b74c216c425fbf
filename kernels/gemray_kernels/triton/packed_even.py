"""Products of 65 to 160 rows with packed weights, for sm_90: every program has the same share of the work.

All rows lie in one tile, so that a weight is decoded once. As many tiles as there are multiprocessors are computed at
one time; of the tiles that are left over the steps, one tile's behind the other's, are cut into equal shares. What a
share has of a tile's sums is added up in the order of the inputs by a kernel behind (`packed_even_rest`). Where tiles
are cut depends on the weight and the tile alone.

In gated products eight gate rows and their eight up rows take turns in a tile: the tensor cores leave a gate's and its
up row's sums in one thread, which applies the gate.

Shape legend: T rows, I inputs, O outputs, S splits of the inputs, P parts of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.triton.early_start import starts_early
from gemray_kernels.triton.gluon_ring import swizzled
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS
from gemray_kernels.triton.packed_even_kernel import HALF_I, EvenShape, packed_even_kernel
from gemray_kernels.triton.packed_even_rest import add_rest
from gemray_kernels.triton.packed_linear import CODES
from gemray_kernels.triton.packed_prompt_numbers import MASKED_E4M3
from gemray_kernels.triton.packed_prompts import fits

FETCH_REGISTERS = 24
MULTIPLY_REGISTERS = {2: 240, 3: 160}
"""By groups."""


@dataclass(frozen=True)
class EvenTile:
    """What one program of a product holds, and into how many parts the inputs are cut."""

    outputs: int
    """Outputs of a group: 64 or 128."""
    groups: int
    """Groups of four warps that multiply: 2, or 3 of 64 outputs."""
    rows: int
    """A power of two."""
    more: int = 0
    """Rows behind those, 16 or 32; with them most rows of the product."""
    splits: int = 1
    shares: bool = False
    """Whether tiles that are left over, of one part, are cut into shares."""


def packed_even_linear(
    x_TI: Tensor, weight: TiledWeight, tile: EvenTile, *, out_dtype: torch.dtype, first: int = 0
) -> Tensor:
    """Summands [S, T, O - first] of ``x · weightᵀ``: the product is their `total`.

    Args:
        x_TI: bfloat16 rows, at least one, as `packed_prompts.fits` says, and no more than the tile's.
        weight: without a leading dimension, of any scaling but EACH.
        tile: of this product.
        out_dtype: of the summands: bfloat16 if there is only one, else float32.
        first: outputs that are left out.

    Raises:
        ValueError: rows or a weight that the tile is not for.
    """
    out_STO = torch.empty(tile.splits, x_TI.shape[0], weight.num_out - first, dtype=out_dtype, device=x_TI.device)
    _launch(x_TI, weight, out_STO, tile, Gate.NONE, first)
    return out_STO


def packed_even_gated_linear(x_TH: Tensor, weight: TiledWeight, tile: EvenTile, gate: Gate) -> Tensor:
    """``act(x · gateᵀ) · (x · upᵀ)`` [T, I] of ``weight = [gate; up]``, rounded as separate kernels round.

    Args:
        x_TH: as for `packed_even_linear`.
        weight: whose gate rows are a multiple of 8.
        tile: of this product, which is one part.
        gate: GELU or SILU.

    Raises:
        ValueError: as there, and for another tile.
    """
    width = weight.num_out // 2
    if tile.splits != 1 or width % 8:
        raise ValueError(f"{tile} of a gated product of {width} results: one part and a multiple of 8 are allowed")
    out_1TO = torch.empty(1, x_TH.shape[0], width, dtype=x_TH.dtype, device=x_TH.device)
    _launch(x_TH, weight, out_1TO, tile, gate, 0)
    return out_1TO[0]


def _launch(x_TI: Tensor, weight: TiledWeight, out_STO: Tensor, tile: EvenTile, gate: Gate, first: int) -> None:
    num_rows, num_in = x_TI.shape
    num_out = out_STO.shape[2]
    most_rows = tile.rows + tile.more
    if not (
        0 < num_rows <= most_rows and x_TI.stride(1) == 1 and num_in == weight.num_in and fits(x_TI, weight, first)
    ):
        raise ValueError(
            f"x {list(x_TI.shape)} with strides {x_TI.stride()} and a weight of {weight.num_in} inputs and, from "
            f"{first} on, {weight.num_out - first} outputs: 1 to {most_rows} rows of as many inputs, one beside the "
            f"other, are allowed, all at multiples of 16 bytes"
        )
    unit = weight.unit
    shape = EvenShape(
        code=CODES[weight.code],
        scaling=weight.scaling.value,
        words=unit.words,
        units=2 * HALF_I.value // unit.inputs,
        rows=tile.rows,
        more=tile.more,
        outputs=tile.outputs,
        groups=tile.groups,
        gate=gate.value,
        whole=out_STO.dtype == torch.bfloat16,
    )
    steps = triton.cdiv(weight.words_BOC.shape[0], shape.units)
    tiles = triton.cdiv(num_out, shape.groups * shape.results)
    if tile.shares:
        programs = MULTIPROCESSORS
        rounds, rest = divmod(tiles, programs)
    else:
        programs = min(MULTIPROCESSORS, tiles * tile.splits)
        rounds, rest = triton.cdiv(tiles * tile.splits, programs), 0
    parts_P = out_STO
    if rest:
        sums = shape.groups * shape.outputs * most_rows
        parts_P = torch.empty(2 * programs, sums, dtype=torch.float32, device=x_TI.device)
    late = starts_early(x_TI)
    bits = 8 * out_STO.dtype.itemsize
    to_layout = swizzled(min(128, out_STO.dtype.itemsize * shape.results), bits, rank=2)
    x_layout = swizzled(128, rank=2)
    more = tile.more or tile.rows
    packed_even_kernel[(programs,)](
        TensorDescriptor.from_tensor(x_TI, [tile.rows, HALF_I.value], x_layout),
        TensorDescriptor.from_tensor(x_TI, [more, HALF_I.value], x_layout),
        _words_in_boxes(weight, shape, first),
        weight.scale_BO[..., first:],
        weight.factor_O[first:],
        TensorDescriptor.from_tensor(out_STO[0], [tile.rows, shape.results], to_layout),
        TensorDescriptor.from_tensor(out_STO[0], [more, shape.results], to_layout),
        out_STO,
        parts_P,
        num_rows,
        num_out,
        tile.splits,
        steps,
        tiles * tile.splits,
        rounds,
        rest,
        weight.words_BOC.shape[0] - 1,
        weight.scale_BO.stride(0),
        SHAPE=shape,
        LATE=late,
        MULTIPLY_REGISTERS=MULTIPLY_REGISTERS[tile.groups],
        FETCH_REGISTERS=FETCH_REGISTERS,
        num_warps=4,
    )
    if rest:
        add_rest(
            parts_P,
            weight.factor_O[first:],
            out_STO[0],
            groups=shape.groups,
            outputs=shape.outputs,
            rows=most_rows,
            programs=programs,
            steps=steps,
            first_tile=rounds * programs,
            rest=rest,
            gate=gate,
            factor=MASKED_E4M3.value if shape.masked else 1.0,
        )


def _words_in_boxes(weight: TiledWeight, shape: EvenShape, first: int) -> TensorDescriptor:
    """Words of a step, by what one request fetches."""
    outputs = shape.boxed * shape.outputs
    if not shape.gate:
        layout = swizzled(2 * shape.words, rank=3)
        return TensorDescriptor.from_tensor(weight.words_BOC[:, first:], [shape.units, outputs, shape.words], layout)
    words_BOG8C = weight.words_BOC.view(-1, 2, weight.num_out // 16, 8, shape.words).transpose(1, 2)
    box = [shape.units, outputs // 16, 2, 8, shape.words]
    return TensorDescriptor.from_tensor(words_BOG8C, box, swizzled(2 * shape.words, rank=5))
