"""Products of few rows with packed weights, for sm_90, whose weights are asked for before the rows are there.

A program starts while the kernel before still runs, and fills its ring of shared memory with codes and scales, which
that kernel does not write; only then does it wait for rows. So memory is read while norms or the last of attention run,
and multiplying begins as soon as rows are there (`benchmarks/results/2026-11-30-h200-packed-clocks`). One warp asks for
codes, scales and rows by the memory accelerator; the others take them into registers, free their place, and decode and
multiply as in `packed_linear`, whose cuts, order of sums and rounding these are: a row has the same bits.

Shape legend: T rows, I inputs, O outputs, S splits of the inputs, B units, C words of a unit, R rows of W words of
several outputs, X scales of a unit as int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.packed_weight import Scaling
from gemray_kernels.triton.activation import gated_sums
from gemray_kernels.triton.ahead_tile import FETCH_REGISTERS, NUM_WARPS, AheadTile, part_of_program, require_one_part
from gemray_kernels.triton.early_start import let_next_start, starts_early
from gemray_kernels.triton.exact_packed_unit import made_larger
from gemray_kernels.triton.gluon_ring import (
    barrier,
    in_wide_rows,
    next_stage,
    ring_barriers,
    store_sums,
    swizzled,
    viewed,
)
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_linear import CODES
from gemray_kernels.triton.packed_prompt_numbers import chosen_numbers_of_half, parts_of_outputs
from gemray_kernels.triton.packed_prompts import fits
from gemray_kernels.triton.packed_ring import UNIT_INPUTS, fetch_steps, require_units, weight_descriptors, weight_tiles

HALF_I = gl.constexpr(64)
"""Inputs of a tile of rows, half a unit's: 128 bytes."""
ROWS = gl.constexpr(8)
"""Rows of a tile, of which some may be zeros."""


@dataclass(frozen=True)
class _Shape:
    """What the compiler knows of a product."""

    code: int
    scaling: int
    words: int
    outputs: int
    stages: int
    gate: int
    exact: bool
    """Numbers are rounded with their factors, in so many parts, and sums are not multiplied with them."""
    parts: int
    units: int = 1
    """Units of a step, as `packed_prompt_numbers` asks."""

    @property
    def tiles(self) -> int:
        """Tiles of outputs."""
        return 2 if self.gate else 1

    @property
    def masked(self) -> bool:
        """Whether e4m3's numbers stay as they are masked out of their words, which makes other bits of small sums."""
        return False


def serves(weight: TiledWeight) -> bool:
    """Whether the kernel decodes such a weight."""
    return weight.scaling in (Scaling.ROW, Scaling.CODES) and weight.unit.inputs == UNIT_INPUTS


def packed_linear_ahead(
    x_TI: Tensor, weight: TiledWeight, tile: AheadTile, *, out_dtype: torch.dtype, first: int = 0
) -> Tensor:
    """Summands [S, T, O - first] of ``x · weightᵀ``: the product is their `total`.

    Args:
        x_TI: at most 8 bfloat16 rows, at least one, as `packed_prompts.fits` says.
        weight: without a leading dimension, in units of 128 inputs, with scales of rows or of codes.
        tile: of this product.
        out_dtype: of the summands; float32 unless there is only one.
        first: outputs that are left out.

    Raises:
        ValueError: rows or a weight that the kernel is not for.
    """
    num_out = weight.num_out - first
    out_STO = torch.empty(tile.splits, x_TI.shape[0], num_out, dtype=out_dtype, device=x_TI.device)
    launch(x_TI, weight, first, out_STO, tile, Gate.NONE)
    return out_STO


def packed_gated_linear_ahead(x_TH: Tensor, weight: TiledWeight, tile: AheadTile, gate: Gate) -> Tensor:
    """``act(x · gateᵀ) · (x · upᵀ)`` [T, I] of ``weight = [gate; up]``, rounded as separate kernels round.

    Args:
        x_TH: as for `packed_linear_ahead`.
        weight: likewise.
        tile: of this product, which is one part.
        gate: GELU or SILU.

    Raises:
        ValueError: as there, and for another tile.
    """
    require_one_part(tile)
    width = weight.num_out // 2
    out_STO = torch.empty(1, x_TH.shape[0], width, dtype=x_TH.dtype, device=x_TH.device)
    launch(x_TH, weight, 0, out_STO, tile, gate)
    return out_STO[0]


def launch(
    x_TI: Tensor,
    weight: TiledWeight,
    first: int,
    out_STO: Tensor,
    tile: AheadTile,
    gate: Gate,
    *,
    exact: bool = False,
) -> None:
    """Write the products of `packed_linear_ahead` or `packed_gated_linear_ahead`.

    With `exact`, numbers are those of exact numerics, and splits are leaves, or one is all inputs.
    """
    num_rows, num_in = x_TI.shape
    num_out = out_STO.shape[2]
    if not serves(weight):
        raise ValueError(
            f"a weight of {weight.code} with {weight.scaling} in units of {weight.unit.inputs} inputs: scales of rows "
            f"or of codes, and units of {UNIT_INPUTS}, are allowed"
        )
    allowed = 0 < num_rows <= ROWS.value and x_TI.stride(1) == 1 and num_in == weight.num_in
    if not (allowed and fits(x_TI, weight, num_out if gate.value else first)):
        raise ValueError(
            f"x {list(x_TI.shape)} with strides {x_TI.stride()} and a weight of {weight.num_in} inputs: 1 to "
            f"{ROWS.value} rows of as many, one beside the other, are allowed, all at multiples of 16 bytes"
        )
    require_units(weight, tile)
    unit = weight.unit
    shape = _Shape(
        code=CODES[weight.code],
        scaling=weight.scaling.value,
        words=unit.words,
        outputs=tile.outputs,
        stages=tile.num_stages,
        gate=gate.value,
        exact=exact,
        parts=weight.parts if exact else 0,
    )
    early = starts_early(x_TI)
    _packed_ahead_kernel[(triton.cdiv(num_out, tile.outputs), tile.splits)](
        TensorDescriptor.from_tensor(x_TI, [ROWS.value, HALF_I.value], swizzled(128, rank=2)),
        *weight_descriptors(weight, first, tile.outputs),
        weight.factor_O[first:],
        weight.parts_or_factors[first:],
        out_STO,
        num_rows,
        num_out,
        len(weight.words_BOC),
        SHAPE=shape,
        EARLY=early,
        FETCH_REGISTERS=FETCH_REGISTERS,
        num_warps=NUM_WARPS,
        maxnreg=tile.most_registers,
        launch_pdl=early,
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _loaded(tiles, at, NUMBERS: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Words [O, C] and scales [O] of a tile."""
    words_tiles, scale_tiles = tiles
    WIDE: gl.constexpr = in_wide_rows(SHAPE.outputs, SHAPE.words)
    TILE: gl.constexpr = (SHAPE.outputs, SHAPE.words)
    words = viewed(words_tiles.index(at), TILE, WIDE).load(NUMBERS)
    scales = gl.arange(0, SHAPE.outputs, gl.SliceLayout(1, NUMBERS))  # a name, where there are none
    if SHAPE.scaling:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        OUTPUTS: gl.constexpr = (SHAPE.outputs,)
        scale_tile = viewed(scale_tiles.index(at), OUTPUTS, PLAIN, gl.int64)
        scales = scale_tile.load(gl.SliceLayout(1, NUMBERS))
    return words, scales


@gluon.jit  # type: ignore[untyped-decorator]
def _added(acc, x_low, x_high, words, scales, parts, NUMBERS: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    acc = mma_v2(chosen_numbers_of_half(words, scales, parts, 0, NUMBERS, SHAPE), x_low, acc)
    return mma_v2(chosen_numbers_of_half(words, scales, parts, 1, NUMBERS, SHAPE), x_high, acc)


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    tiles, x_tiles, barriers, factor_O, parts_O, out_STO, num_rows, split, sizes, SHAPE: gl.constexpr
):
    OUTPUTS: gl.constexpr = SHAPE.outputs
    TILES: gl.constexpr = SHAPE.tiles
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 8]
    )
    NUMBERS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    ready, free = barriers
    first, end, o, num_out = sizes
    # Past the end the last output is computed again, and not stored.
    weight_O = gl.minimum(o + gl.arange(0, OUTPUTS, gl.SliceLayout(1, NUMBERS)), num_out - 1)
    parts = parts_of_outputs(parts_O, weight_O, SHAPE)
    up_parts = parts
    if SHAPE.gate:
        up_parts = parts_of_outputs(parts_O, weight_O + num_out, SHAPE)
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
    up = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
    stage = 0
    phase = 0
    for _unit in range(first, end):
        mbarrier.wait(ready.index(stage), phase)
        x_low = x_tiles.index(2 * stage).permute((1, 0)).load(RIGHT)
        x_high = x_tiles.index(2 * stage + 1).permute((1, 0)).load(RIGHT)
        words, scales = _loaded(tiles, stage * TILES, NUMBERS, SHAPE)
        up_words = words
        up_scales = scales
        if SHAPE.gate:
            up_words, up_scales = _loaded(tiles, stage * TILES + 1, NUMBERS, SHAPE)
        # What all warps have in registers may be overwritten.
        barrier()
        mbarrier.arrive(free.index(stage))
        acc = _added(acc, x_low, x_high, words, scales, parts, NUMBERS, SHAPE)
        if SHAPE.gate:
            up = _added(up, x_low, x_high, up_words, up_scales, up_parts, NUMBERS, SHAPE)
        stage, phase = next_stage(stage, phase, SHAPE.stages)

    o_O = o + gl.arange(0, OUTPUTS, gl.SliceLayout(1, SUMS))
    factor_at_O = factor_O + gl.minimum(o_O, num_out - 1)
    if SHAPE.exact:
        acc = made_larger(acc, SHAPE.code, SHAPE.scaling, SHAPE.parts)
        up = made_larger(up, SHAPE.code, SHAPE.scaling, SHAPE.parts)
    else:
        acc *= gl.load(factor_at_O).expand_dims(1)
        if SHAPE.gate:
            up *= gl.load(factor_at_O + num_out).expand_dims(1)
    dtype: gl.constexpr = out_STO.dtype.element_ty
    if SHAPE.gate:
        acc = gated_sums(acc, up, dtype, SHAPE.gate == 1)
    store_sums(acc.to(dtype), None, (None, out_STO), (split, 0, o), (num_rows, num_out), False)


@gluon.jit(do_not_specialize=["num_rows", "units"])  # type: ignore[untyped-decorator]
def _packed_ahead_kernel(  # type: ignore[no-untyped-def]
    x_TI,
    words_BRW,
    scale_BX,
    factor_O,
    parts_O,
    out_STO,
    num_rows,
    num_out,
    units,
    SHAPE: gl.constexpr,
    EARLY: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    STAGES: gl.constexpr = SHAPE.stages
    let_next_start(EARLY)
    tiles = weight_tiles(words_BRW, scale_BX, SHAPE)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, ROWS, HALF_I], x_TI.layout)
    barriers = ring_barriers(1, STAGES)
    fence_async_shared()
    barrier()
    split, sizes = part_of_program(units, num_out, SHAPE)
    gl.warp_specialize(
        [
            (_multiply, (tiles, x_tiles, barriers, factor_O, parts_O, out_STO, num_rows, split, sizes, SHAPE)),
            (fetch_steps, (x_TI, words_BRW, scale_BX, tiles, x_tiles, barriers, sizes, SHAPE, EARLY)),
        ],
        [1],
        [FETCH_REGISTERS],
    )
