"""Products of a verify step's rows with packed weights, for sm_90: fetching, decoding and multiplying at one time.

As in `packed_prompts`, groups of four warps make numbers in registers and multiply them with rows in shared memory, and
a warp fetches ahead. With few rows the tensor cores have done with a half of a step sooner than the next one is
decoded, and what lies between two steps counts: so a group waits and frees once a step, in gated products for two tiles
of 64 outputs, and decodes each half of a tile while the tensor cores have the one before it. The gate's tile and the up
rows' are rounded and gated as in `packed_linear`.

Parts of the inputs end where those of `packed_linear` end, and are added up in its order: a row has the same bits.

Shape legend: T rows, I inputs, O outputs, S splits of the inputs, B units, C words of a unit, G gate and up, or one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.packed_weight import Scaling
from gemray_kernels.triton.activation import gated_sums
from gemray_kernels.triton.early_start import let_next_start, starts_early
from gemray_kernels.triton.gluon_ring import barrier, fetch, next_stage, ring_barriers, store_sums, swizzled
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS
from gemray_kernels.triton.packed_linear import CODES
from gemray_kernels.triton.packed_prompt_numbers import numbers_of_half, scales_of_step
from gemray_kernels.triton.packed_prompts import fits

HALF_I = gl.constexpr(64)
"""Inputs of a tile of rows, half a step's: 128 bytes, as in `packed_prompts`."""
TILE_O = 64
"""Outputs of a tile: what a group's product has at least."""
FETCH_REGISTERS = 24
MULTIPLY_REGISTERS = {3: 160, 4: 112}
"""By groups."""
SHARED_BYTES = 226 * 1024
"""What a program's tiles may take; barriers have the rest of what there is."""
MOST_STAGES = 8


@dataclass(frozen=True)
class VerifyTile:
    """What one program of a product holds, and into how many parts the inputs are cut."""

    groups: int
    """Groups of four warps that multiply: 3 or 4."""
    rows: int
    """A power of two; most rows of the product."""
    splits: int = 1


@dataclass(frozen=True)
class _Shape:
    """What the compiler knows of a product."""

    code: int
    scaling: int
    words: int
    units: int
    """Units of a step. The second of two may lie behind the last one: its words and rows are zeros then."""
    rows: int
    outputs: int
    groups: int
    gate: int
    whole: bool
    """There is one summand, which is rounded to bfloat16."""

    @property
    def tiles(self) -> int:
        """Tiles of outputs of a group."""
        return 2 if self.gate else 1

    @property
    def stages(self) -> int:
        """Steps that shared memory has room for."""
        results = 2 * self.groups * self.rows * self.outputs if self.whole else 0
        step = 2 * self.groups * self.units * self.tiles * self.outputs * self.words + 4 * self.rows * HALF_I.value
        return int(min(MOST_STAGES, (SHARED_BYTES - results) // step))

    @property
    def masked(self) -> bool:
        """Whether e4m3's numbers stay as they are masked out of their words, which makes other bits of small sums."""
        return False


def packed_verify_linear(
    x_TI: Tensor, weight: TiledWeight, tile: VerifyTile, *, out_dtype: torch.dtype, first: int = 0
) -> Tensor:
    """Summands [S, T, O - first] of ``x · weightᵀ``: the product is their `total`.

    Args:
        x_TI: bfloat16 rows, at least one, as `packed_prompts.fits` says, and no more than the tile's.
        weight: without a leading dimension, with scales of rows or of codes.
        tile: of this product.
        out_dtype: of the summands; float32 unless there is only one.
        first: outputs that are left out.

    Raises:
        ValueError: rows or a weight that the tile is not for.
    """
    num_out = weight.num_out - first
    out_STO = torch.empty(tile.splits, x_TI.shape[0], num_out, dtype=out_dtype, device=x_TI.device)
    words_BGOC = weight.words_BOC[:, first:].unsqueeze(1)
    _launch(x_TI, weight, words_BGOC, out_STO, tile, Gate.NONE, first)
    return out_STO


def packed_verify_gated_linear(x_TH: Tensor, weight: TiledWeight, tile: VerifyTile, gate: Gate) -> Tensor:
    """``act(x · gateᵀ) · (x · upᵀ)`` [T, I] of ``weight = [gate; up]``, rounded as separate kernels round.

    Args:
        x_TH: as for `packed_verify_linear`.
        weight: whose gate rows are a multiple of 8.
        tile: of this product, which is one part.
        gate: GELU or SILU.

    Raises:
        ValueError: as there, and for another tile.
    """
    width = weight.num_out // 2
    if tile.splits != 1:
        raise ValueError(f"{tile} of a gated product: one part is allowed")
    out_STO = torch.empty(1, x_TH.shape[0], width, dtype=x_TH.dtype, device=x_TH.device)
    units, _, words = weight.words_BOC.shape
    words_BGOC = weight.words_BOC.view(units, 2, width, words)
    _launch(x_TH, weight, words_BGOC, out_STO, tile, gate, 0)
    return out_STO[0]


def _launch(
    x_TI: Tensor, weight: TiledWeight, words_BGOC: Tensor, out_STO: Tensor, tile: VerifyTile, gate: Gate, first: int
) -> None:
    num_rows, num_in = x_TI.shape
    num_out = out_STO.shape[2]
    if weight.scaling not in (Scaling.ROW, Scaling.CODES):
        raise ValueError(f"a weight with {weight.scaling}: scales of rows or of codes are allowed")
    allowed = 0 < num_rows <= tile.rows and x_TI.stride(1) == 1 and num_in == weight.num_in
    if not (allowed and fits(x_TI, weight, first) and num_out % 8 == 0):
        raise ValueError(
            f"x {list(x_TI.shape)} with strides {x_TI.stride()}, a weight of {weight.num_in} inputs and {num_out} "
            f"outputs: 1 to {tile.rows} rows of as many inputs, one beside the other, are allowed, all at multiples of "
            f"16 bytes"
        )
    unit = weight.unit
    shape = _Shape(
        code=CODES[weight.code],
        scaling=weight.scaling.value,
        words=unit.words,
        units=2 * HALF_I.value // unit.inputs,
        rows=tile.rows,
        outputs=TILE_O,
        groups=tile.groups,
        gate=gate.value,
        whole=out_STO.dtype == torch.bfloat16,
    )
    num_tiles = triton.cdiv(num_out, TILE_O * tile.groups) * tile.splits
    units = weight.words_BOC.shape[0]
    _packed_verify_kernel[(min(num_tiles, MULTIPROCESSORS),)](
        TensorDescriptor.from_tensor(x_TI, [tile.rows, HALF_I.value], swizzled(128, rank=2)),
        TensorDescriptor.from_tensor(
            words_BGOC, [shape.units, shape.tiles, TILE_O, unit.words], swizzled(2 * unit.words, rank=4)
        ),
        weight.scale_BO[..., first:],
        weight.factor_O[first:],
        TensorDescriptor.from_tensor(
            out_STO[0], [tile.rows, TILE_O], swizzled(128, 8 * out_STO.dtype.itemsize, rank=2)
        ),
        out_STO,
        num_rows,
        num_out,
        tile.splits,
        triton.cdiv(units, shape.units),
        num_tiles,
        units - 1,
        weight.scale_BO.stride(0),
        SHAPE=shape,
        LATE=starts_early(x_TI),
        MULTIPLY_REGISTERS=MULTIPLY_REGISTERS[tile.groups],
        FETCH_REGISTERS=FETCH_REGISTERS,
        num_warps=4,
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _place(tile, num_out, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Split and first output of a program's tile."""
    BLOCK_O: gl.constexpr = SHAPE.groups * SHAPE.outputs
    out_tiles = gl.cdiv(num_out, BLOCK_O)
    return tile // out_tiles, tile % out_tiles * BLOCK_O


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_steps(x_TI, words_BGOC, tiles, barriers, sizes, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """All that the groups of this program multiply, in their order."""
    GROUPS: gl.constexpr = SHAPE.groups
    x_tiles, words_tiles, _ = tiles
    ready, free = barriers
    _, num_out, splits, steps, num_tiles = sizes
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        split, o = _place(tile, num_out, SHAPE)
        for step in range(split * steps // splits, (split + 1) * steps // splits):
            mbarrier.wait(free.index(stage), phase)
            is_there = ready.index(stage)
            mbarrier.expect(is_there, GROUPS * words_BGOC.block_type.nbytes + 2 * x_TI.block_type.nbytes)
            for group in gl.static_range(GROUPS):
                to = words_tiles.index(stage * GROUPS + group)
                fetch(words_BGOC, [step * SHAPE.units, 0, o + group * SHAPE.outputs, 0], is_there, to)
            for half in gl.static_range(2):
                fetch(x_TI, [0, (2 * step + half) * HALF_I], is_there, x_tiles.index(2 * stage + half))
            stage, phase = next_stage(stage, phase, SHAPE.stages)


@gluon.jit  # type: ignore[untyped-decorator]
def _words(words_tiles, place, TILE: gl.constexpr, LAYOUT: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Words [O, C] that each half of a tile's step is made of."""
    UNIT_O: gl.constexpr = SHAPE.tiles * SHAPE.outputs
    of_group = words_tiles.index(place).reshape((SHAPE.units * UNIT_O, SHAPE.words))
    low = of_group.slice(TILE * SHAPE.outputs, SHAPE.outputs).load(LAYOUT)
    high = low
    if SHAPE.units == 2:
        high = of_group.slice(UNIT_O + TILE * SHAPE.outputs, SHAPE.outputs).load(LAYOUT)
    return low, high


@gluon.jit  # type: ignore[untyped-decorator]
def _sums(tiles, barriers, weight, place, steps, GROUP: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Sums [O, T] of a group's tile, those of its up tile (else zeros), and the stage behind them with its phase."""
    ROWS: gl.constexpr = SHAPE.rows
    OUTPUTS: gl.constexpr = SHAPE.outputs
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    NUMBERS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    x_tiles, words_tiles, _ = tiles
    ready, free = barriers
    o, num_out, stage, phase = place
    first, end = steps
    # Past the end the last output is computed again, and not stored.
    o_O = gl.minimum(o + gl.arange(0, OUTPUTS, gl.SliceLayout(1, NUMBERS)), num_out - 1)
    up_O = o_O + num_out
    # Scales come from memory two steps before their use.
    following = gl.minimum(first + 1, end - 1)
    scales = scales_of_step(weight, first, o_O, SHAPE)
    next_scales = scales_of_step(weight, following, o_O, SHAPE)
    if SHAPE.gate:
        up_scales = scales_of_step(weight, first, up_O, SHAPE)
        next_up_scales = scales_of_step(weight, following, up_O, SHAPE)
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
    up = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
    mbarrier.wait(ready.index(stage), phase)
    low_words, high_words = _words(words_tiles, stage * SHAPE.groups + GROUP, 0, NUMBERS, SHAPE)
    low = numbers_of_half(low_words, scales[0], 0, NUMBERS, SHAPE)
    for step in range(first, end):
        following = gl.minimum(step + 2, end - 1)
        x_low = x_tiles.index(2 * stage).permute((1, 0))
        x_high = x_tiles.index(2 * stage + 1).permute((1, 0))
        acc = warpgroup_mma(low, x_low, acc, is_async=True)
        high = numbers_of_half(high_words, scales[1], 1, NUMBERS, SHAPE)
        acc = warpgroup_mma(high, x_high, acc, is_async=True)
        scales = next_scales
        next_scales = scales_of_step(weight, following, o_O, SHAPE)
        acc, low = warpgroup_mma_wait(1, deps=(acc, low))
        if SHAPE.gate:
            low_words, high_words = _words(words_tiles, stage * SHAPE.groups + GROUP, 1, NUMBERS, SHAPE)
            low = numbers_of_half(low_words, up_scales[0], 0, NUMBERS, SHAPE)
            up = warpgroup_mma(low, x_low, up, is_async=True)
            acc, high = warpgroup_mma_wait(1, deps=(acc, high))
            high = numbers_of_half(high_words, up_scales[1], 1, NUMBERS, SHAPE)
            up = warpgroup_mma(high, x_high, up, is_async=True)
            up_scales = next_up_scales
            next_up_scales = scales_of_step(weight, following, up_O, SHAPE)
            up, low = warpgroup_mma_wait(1, deps=(up, low))
        before = stage
        stage, phase = next_stage(stage, phase, SHAPE.stages)
        # Behind the last step there may be nothing: what is read then is not used.
        mbarrier.wait(ready.index(stage), phase, pred=step + 1 < end)
        low_words, high_words = _words(words_tiles, stage * SHAPE.groups + GROUP, 0, NUMBERS, SHAPE)
        low = numbers_of_half(low_words, scales[0], 0, NUMBERS, SHAPE)
        # Were a product to run on into the next step, the assembler would let none run beside others.
        acc, up, high = warpgroup_mma_wait(0, deps=(acc, up, high))
        # What every warp of the group has done with may be overwritten.
        barrier()
        mbarrier.arrive(free.index(before))
    return acc, up, stage, phase


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply(tiles, barriers, weight, results, sizes, GROUP: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """The results of one group, tile after tile."""
    num_rows, num_out, splits, steps, num_tiles = sizes
    factor_O = weight[1]
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        split, o = _place(tile, num_out, SHAPE)
        o += GROUP * SHAPE.outputs
        part = (split * steps // splits, (split + 1) * steps // splits)
        acc, up, stage, phase = _sums(tiles, barriers, weight, (o, num_out, stage, phase), part, GROUP, SHAPE)
        LAYOUT: gl.constexpr = acc.type.layout
        o_O = o + gl.arange(0, SHAPE.outputs, gl.SliceLayout(1, LAYOUT))
        factor_at_O = factor_O + gl.minimum(o_O, num_out - 1)
        acc *= gl.load(factor_at_O).expand_dims(1)
        if SHAPE.gate:
            acc = gated_sums(acc, up * gl.load(factor_at_O + num_out).expand_dims(1), gl.bfloat16, SHAPE.gate == 1)
        store_sums(acc, tiles[2].index(GROUP), results, (split, 0, o), (num_rows, num_out), SHAPE.whole)
    if SHAPE.whole:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "splits", "steps", "num_tiles", "last_unit"])  # type: ignore[untyped-decorator]
def _packed_verify_kernel(  # type: ignore[no-untyped-def]
    x_TI,
    words_BGOC,
    scale_BO,
    factor_O,
    out_TO,
    out_STO,
    num_rows,
    num_out,
    splits,
    steps,
    num_tiles,
    last_unit,
    scale_stride,
    SHAPE: gl.constexpr,
    LATE: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    STAGES: gl.constexpr = SHAPE.stages
    let_next_start(LATE)
    x_tiles = gl.allocate_shared_memory(x_TI.dtype, [2 * STAGES, SHAPE.rows, HALF_I], x_TI.layout)
    words_tiles = gl.allocate_shared_memory(
        words_BGOC.dtype,
        [STAGES * SHAPE.groups, SHAPE.units, SHAPE.tiles, SHAPE.outputs, SHAPE.words],
        words_BGOC.layout,
    )
    out_tiles = x_tiles  # a name, where results are stored as they are
    if SHAPE.whole:
        out_tiles = gl.allocate_shared_memory(out_TO.dtype, [SHAPE.groups, SHAPE.rows, SHAPE.outputs], out_TO.layout)
    barriers = ring_barriers(SHAPE.groups, STAGES)
    fence_async_shared()
    barrier()
    tiles = (x_tiles, words_tiles, out_tiles)
    weight = (scale_BO, factor_O, last_unit, scale_stride)
    results = (out_TO, out_STO)
    sizes = (num_rows, num_out, splits, steps, num_tiles)
    if SHAPE.groups == 3:
        gl.warp_specialize(
            [
                (_multiply, (tiles, barriers, weight, results, sizes, 0, SHAPE)),
                (_multiply, (tiles, barriers, weight, results, sizes, 1, SHAPE)),
                (_multiply, (tiles, barriers, weight, results, sizes, 2, SHAPE)),
                (_fetch_steps, (x_TI, words_BGOC, tiles, barriers, sizes, SHAPE)),
            ],
            [4, 4, 1],
            [MULTIPLY_REGISTERS, MULTIPLY_REGISTERS, FETCH_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (tiles, barriers, weight, results, sizes, 0, SHAPE)),
                (_multiply, (tiles, barriers, weight, results, sizes, 1, SHAPE)),
                (_multiply, (tiles, barriers, weight, results, sizes, 2, SHAPE)),
                (_multiply, (tiles, barriers, weight, results, sizes, 3, SHAPE)),
                (_fetch_steps, (x_TI, words_BGOC, tiles, barriers, sizes, SHAPE)),
            ],
            [4, 4, 4, 1],
            [MULTIPLY_REGISTERS, MULTIPLY_REGISTERS, MULTIPLY_REGISTERS, FETCH_REGISTERS],
        )
