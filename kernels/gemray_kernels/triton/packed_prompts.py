"""Products of many rows with packed weights, for sm_90: decoding hides behind the tensor cores.

Groups of four warps hold some outputs each. By steps of 128 inputs a group makes numbers in registers, in the tensor
cores' own order (`packed_prompt_numbers`), and multiplies them with rows in shared memory: while the tensor cores work
for the first half of a step, its second half is decoded, and while they wait for one group, they work for the others.
One warp fetches words and rows ahead, into a ring each: words are free again once they are in registers, rows once they
are multiplied, half a step at a time.

Shape legend: T rows, I inputs, O outputs, S splits of the inputs, B units, C words of a unit.
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
from gemray_kernels.triton.exact_packed_unit import made_larger
from gemray_kernels.triton.gluon_ring import barrier, fetch, next_stage, ring_barriers, store_sums, swizzled
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS
from gemray_kernels.triton.packed_linear import CODES
from gemray_kernels.triton.packed_prompt_numbers import (
    MASKED_E4M3,
    chosen_numbers_of_half,
    parts_of_outputs,
    scales_of_step,
    words_of_step,
)

BLOCK_I = gl.constexpr(64)
"""Inputs of a tile of rows, half a step's: 128 bytes, which wgmma reads from shared memory as the accelerator swizzles
them."""
SIDE_BY_SIDE = 8
"""Tiles of rows that run side by side over the same outputs, so that they find their words in the cache."""
FETCH_REGISTERS = 24
MULTIPLY_REGISTERS = {2: 240, 3: 160}
"""By groups."""
SHARED_BYTES = 226 * 1024
"""What a program's tiles may take; barriers have the rest of what there is."""
WORDS_STAGES = 2
"""Steps of which words are at hand."""
MOST_ROW_STAGES = 12


@dataclass(frozen=True)
class PromptTile:
    """What one program of a product of many rows holds, and into how many parts the inputs are cut."""

    outputs: int
    """Outputs of a group: 64 or 128."""
    groups: int
    """Groups of four warps that multiply: 2, or 3 of 64 outputs."""
    rows: int
    """A power of two; with the outputs of a group at most 16,384 sums."""
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
    side_by_side: int
    words_stages: int
    whole: bool
    """There is one summand, which is rounded to bfloat16."""
    exact: bool
    """Numbers are rounded with their factors, in so many parts, and sums are not multiplied with them."""
    parts: int

    @property
    def masked(self) -> bool:
        """Whether e4m3's numbers stay as they are masked out of their words."""
        return not self.exact and self.code == CODES["fp8"] and self.scaling == Scaling.ROW.value

    @property
    def row_stages(self) -> int:
        """Tiles of rows that shared memory has room for."""
        results = 2 * self.groups * self.rows * self.outputs if self.whole else 0
        words = 2 * self.words_stages * self.groups * self.units * self.outputs * self.words
        return int(min(MOST_ROW_STAGES, (SHARED_BYTES - results - words) // (2 * self.rows * BLOCK_I.value)))


def fits(x_TI: Tensor, weight: TiledWeight, first: int = 0) -> bool:
    """Whether the memory accelerator can address rows and results: all at multiples of 16 bytes."""
    lengths = (x_TI.stride(0), x_TI.shape[1], weight.num_out, first)
    return all(length % 8 == 0 for length in lengths) and x_TI.data_ptr() % 16 == 0


def packed_prompt_linear(
    x_TI: Tensor,
    weight: TiledWeight,
    tile: PromptTile,
    *,
    out_dtype: torch.dtype,
    first: int = 0,
    exact: bool = False,
) -> Tensor:
    """Summands [S, T, O - first] of ``x · weightᵀ``: the product is their `total`.

    Args:
        x_TI: bfloat16 rows, at least one, as `fits` says. The accelerator puts zeros behind their last input.
        weight: without a leading dimension, of any scaling but EACH.
        tile: of this product.
        out_dtype: of the summands; float32 unless there is only one.
        first: outputs that are left out.
        exact: numbers are those of exact numerics, of a weight as `exact_packed_ahead.makes_numbers` says, and the
            tile's splits are its leaves, which are whole steps if there are several.
    """
    num_rows, num_in = x_TI.shape
    if num_rows == 0 or x_TI.stride(1) != 1 or num_in != weight.num_in or not fits(x_TI, weight, first):
        raise ValueError(
            f"x {list(x_TI.shape)} with strides {x_TI.stride()} and a weight of {weight.num_in} inputs and, from "
            f"{first} on, {weight.num_out - first} outputs: rows of as many inputs, one beside the other and at least "
            f"one, are allowed, all at multiples of 16 bytes"
        )
    num_out = weight.num_out - first
    out_STO = torch.empty(tile.splits, num_rows, num_out, dtype=out_dtype, device=x_TI.device)
    unit = weight.unit
    units = 2 * BLOCK_I.value // unit.inputs
    shape = _Shape(
        code=CODES[weight.code],
        scaling=weight.scaling.value,
        words=unit.words,
        units=units,
        rows=tile.rows,
        outputs=tile.outputs,
        groups=tile.groups,
        side_by_side=SIDE_BY_SIDE,
        words_stages=WORDS_STAGES,
        whole=out_dtype == torch.bfloat16,
        exact=exact,
        parts=weight.parts if exact else 0,
    )
    words_BOC = weight.words_BOC[:, first:]
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.outputs * tile.groups) * tile.splits
    _packed_prompt_kernel[(min(num_tiles, MULTIPROCESSORS),)](
        TensorDescriptor.from_tensor(x_TI, [tile.rows, BLOCK_I.value], swizzled(128, rank=2)),
        TensorDescriptor.from_tensor(words_BOC, [1, tile.outputs, unit.words], swizzled(2 * unit.words, rank=3)),
        weight.scale_BO[..., first:],
        weight.factor_O[first:],
        weight.parts_or_factors[first:],
        TensorDescriptor.from_tensor(
            out_STO[0], [tile.rows, tile.outputs], swizzled(128, 8 * out_dtype.itemsize, rank=2)
        ),
        out_STO,
        num_rows,
        num_out,
        tile.splits,
        triton.cdiv(weight.words_BOC.shape[0], units),
        num_tiles,
        weight.words_BOC.shape[0] - 1,
        weight.scale_BO.stride(0),
        SHAPE=shape,
        MULTIPLY_REGISTERS=MULTIPLY_REGISTERS[tile.groups],
        FETCH_REGISTERS=FETCH_REGISTERS,
        num_warps=4,
    )
    return out_STO


@gluon.jit  # type: ignore[untyped-decorator]
def _place(tile, num_rows, num_out, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Split, first row and first output of a tile."""
    row_tiles = gl.cdiv(num_rows, SHAPE.rows)
    out_tiles = gl.cdiv(num_out, SHAPE.groups * SHAPE.outputs)
    split = tile // (row_tiles * out_tiles)
    tile = tile % (row_tiles * out_tiles)
    first = tile // (SHAPE.side_by_side * out_tiles) * SHAPE.side_by_side
    width = gl.minimum(row_tiles - first, SHAPE.side_by_side)
    place = tile % (SHAPE.side_by_side * out_tiles)
    return split, (first + place % width) * SHAPE.rows, place // width * SHAPE.groups * SHAPE.outputs


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_steps(x_TI, words_BOC, tiles, barriers, sizes, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """All that the groups of this program multiply, in their order."""
    UNITS: gl.constexpr = SHAPE.units
    GROUPS: gl.constexpr = SHAPE.groups
    x_tiles, words_tiles, _ = tiles
    x_ready, x_free, words_ready, words_free = barriers
    num_rows, num_out, splits, steps, num_tiles = sizes
    x_stage = 0
    x_phase = 1
    words_stage = 0
    words_phase = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        split, t, o = _place(tile, num_rows, num_out, SHAPE)
        for step in range(split * steps // splits, (split + 1) * steps // splits):
            mbarrier.wait(words_free.index(words_stage), words_phase)
            is_there = words_ready.index(words_stage)
            mbarrier.expect(is_there, GROUPS * UNITS * words_BOC.block_type.nbytes)
            for unit in gl.static_range(UNITS):
                for group in gl.static_range(GROUPS):
                    to = words_tiles.index((words_stage * GROUPS + group) * UNITS + unit)
                    fetch(words_BOC, [step * UNITS + unit, o + group * SHAPE.outputs, 0], is_there, to)
            words_stage, words_phase = next_stage(words_stage, words_phase, SHAPE.words_stages)
            for half in gl.static_range(2):
                mbarrier.wait(x_free.index(x_stage), x_phase)
                is_there = x_ready.index(x_stage)
                mbarrier.expect(is_there, x_TI.block_type.nbytes)
                fetch(x_TI, [t, (2 * step + half) * BLOCK_I], is_there, x_tiles.index(x_stage))
                x_stage, x_phase = next_stage(x_stage, x_phase, SHAPE.row_stages)


@gluon.jit  # type: ignore[untyped-decorator]
def _store(acc, out_tiles, weight, results, place, sizes, GROUP: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Scale and store a tile's sums [O, T]."""
    _, factor_O, _, _ = weight
    num_rows, num_out, _, _, _ = sizes
    LAYOUT: gl.constexpr = acc.type.layout
    o_O = place[2] + gl.arange(0, SHAPE.outputs, gl.SliceLayout(1, LAYOUT))
    if SHAPE.exact:
        acc = made_larger(acc, SHAPE.code, SHAPE.scaling, SHAPE.parts)
    else:
        if SHAPE.masked:
            acc *= MASKED_E4M3
        acc *= gl.load(factor_O + gl.minimum(o_O, num_out - 1)).expand_dims(1)
    store_sums(acc, out_tiles.index(GROUP), results, place, (num_rows, num_out), SHAPE.whole)


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply(tiles, barriers, weight, parts_O, results, sizes, GROUP: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of one group, tile after tile."""
    ROWS: gl.constexpr = SHAPE.rows
    OUTPUTS: gl.constexpr = SHAPE.outputs
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    NUMBERS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    x_tiles, words_tiles, out_tiles = tiles
    x_ready, x_free, words_ready, words_free = barriers
    num_rows, num_out, splits, steps, num_tiles = sizes
    x_stage = 0
    x_phase = 0
    words_stage = 0
    words_phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        split, t, o = _place(tile, num_rows, num_out, SHAPE)
        o += GROUP * OUTPUTS
        # Past the end the last output is computed again, and not stored.
        o_O = gl.minimum(o + gl.arange(0, OUTPUTS, gl.SliceLayout(1, NUMBERS)), num_out - 1)
        first = split * steps // splits
        end = (split + 1) * steps // splits
        low_scales, high_scales = scales_of_step(weight, first, o_O, SHAPE)
        parts = parts_of_outputs(parts_O, o_O, SHAPE)
        acc = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
        for step in range(first, end):
            mbarrier.wait(words_ready.index(words_stage), words_phase)
            low_words, high_words = words_of_step(words_tiles, words_stage, GROUP, NUMBERS, SHAPE)
            low = chosen_numbers_of_half(low_words, low_scales, parts, 0, NUMBERS, SHAPE)
            mbarrier.wait(x_ready.index(x_stage), x_phase)
            acc = warpgroup_mma(low, x_tiles.index(x_stage).permute((1, 0)), acc, is_async=True)
            high_stage, high_phase = next_stage(x_stage, x_phase, SHAPE.row_stages)
            high = chosen_numbers_of_half(high_words, high_scales, parts, 1, NUMBERS, SHAPE)
            mbarrier.wait(x_ready.index(high_stage), high_phase)
            acc = warpgroup_mma(high, x_tiles.index(high_stage).permute((1, 0)), acc, is_async=True)
            # What every warp of the group has done with may be overwritten.
            barrier()
            mbarrier.arrive(words_free.index(words_stage))
            words_stage, words_phase = next_stage(words_stage, words_phase, SHAPE.words_stages)
            low_scales, high_scales = scales_of_step(weight, gl.minimum(step + 1, end - 1), o_O, SHAPE)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            barrier()
            mbarrier.arrive(x_free.index(x_stage))
            acc, low, high = warpgroup_mma_wait(0, deps=(acc, low, high))
            barrier()
            mbarrier.arrive(x_free.index(high_stage))
            x_stage, x_phase = next_stage(high_stage, high_phase, SHAPE.row_stages)
        _store(acc, out_tiles, weight, results, (split, t, o), sizes, GROUP, SHAPE)
    if SHAPE.whole:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "splits", "steps", "num_tiles", "last_unit"])  # type: ignore[untyped-decorator]
def _packed_prompt_kernel(  # type: ignore[no-untyped-def]
    x_TI,
    words_BOC,
    scale_BO,
    factor_O,
    parts_O,
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
    MULTIPLY_REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    ROW_STAGES: gl.constexpr = SHAPE.row_stages
    WORDS_STAGES: gl.constexpr = SHAPE.words_stages
    x_tiles = gl.allocate_shared_memory(x_TI.dtype, [ROW_STAGES, SHAPE.rows, BLOCK_I], x_TI.layout)
    words_tiles = gl.allocate_shared_memory(
        words_BOC.dtype,
        [WORDS_STAGES * SHAPE.groups * SHAPE.units, 1, SHAPE.outputs, SHAPE.words],
        words_BOC.layout,
    )
    out_tiles = x_tiles  # a name, where results are stored as they are
    if SHAPE.whole:
        out_tiles = gl.allocate_shared_memory(out_TO.dtype, [SHAPE.groups, SHAPE.rows, SHAPE.outputs], out_TO.layout)
    x_ready, x_free = ring_barriers(SHAPE.groups, ROW_STAGES)
    words_ready, words_free = ring_barriers(SHAPE.groups, WORDS_STAGES)
    fence_async_shared()
    barrier()
    tiles = (x_tiles, words_tiles, out_tiles)
    barriers = (x_ready, x_free, words_ready, words_free)
    weight = (scale_BO, factor_O, last_unit, scale_stride)
    results = (out_TO, out_STO)
    sizes = (num_rows, num_out, splits, steps, num_tiles)
    if SHAPE.groups == 2:
        gl.warp_specialize(
            [
                (_multiply, (tiles, barriers, weight, parts_O, results, sizes, 0, SHAPE)),
                (_multiply, (tiles, barriers, weight, parts_O, results, sizes, 1, SHAPE)),
                (_fetch_steps, (x_TI, words_BOC, tiles, barriers, sizes, SHAPE)),
            ],
            [4, 1],
            [MULTIPLY_REGISTERS, FETCH_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (tiles, barriers, weight, parts_O, results, sizes, 0, SHAPE)),
                (_multiply, (tiles, barriers, weight, parts_O, results, sizes, 1, SHAPE)),
                (_multiply, (tiles, barriers, weight, parts_O, results, sizes, 2, SHAPE)),
                (_fetch_steps, (x_TI, words_BOC, tiles, barriers, sizes, SHAPE)),
            ],
            [4, 4, 1],
            [MULTIPLY_REGISTERS, MULTIPLY_REGISTERS, FETCH_REGISTERS],
        )
