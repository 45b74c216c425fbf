"""Products of many rows with packed weights, for sm_90: decoding hides behind the tensor cores.

One warp fetches words of codes and tiles of rows, always some units ahead. Groups of four warps hold some outputs each:
a group makes a unit's numbers in registers, in the tensor cores' own order, and multiplies them with rows in shared
memory. While one group decodes, the tensor cores work for the others.

Shape legend: T rows, I inputs, O outputs, S splits of the inputs, B units, C words of a unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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

from gemray_kernels.packed_tiles import UNITS, TiledWeight
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS
from gemray_kernels.triton.packed_linear import CODES
from gemray_kernels.triton.packed_planes import e4m3, int8, plain_int4, scaled_e2m1, scaled_int4

BLOCK_I = gl.constexpr(64)
"""Inputs of a tile of rows, 128 bytes, which wgmma reads from shared memory as the accelerator swizzles them."""
SIDE_BY_SIDE = 8
"""Tiles of rows that run side by side over the same outputs, so that they find their words in the cache."""
FETCH_REGISTERS = 24
MULTIPLY_REGISTERS = {2: 240, 3: 160}
"""By groups."""
SHARED_BYTES = 226 * 1024
"""What a program's tiles may take; barriers have the rest of what there is."""
MOST_STAGES = 7

# Triton 3.9 names two of Gluon's functions anew.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_write = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


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
    blocks: int
    """Tiles of rows that a unit is multiplied with."""
    rows: int
    outputs: int
    groups: int
    side_by_side: int
    whole: bool
    """There is one summand, which is rounded to bfloat16."""

    @property
    def stages(self) -> int:
        """Units that shared memory has room for."""
        results = 2 * self.groups * self.rows * self.outputs if self.whole else 0
        unit = 2 * (self.blocks * self.rows * BLOCK_I.value + self.groups * self.outputs * self.words)
        return int(min(MOST_STAGES, (SHARED_BYTES - results) // unit))


def fits(x_TI: Tensor, weight: TiledWeight, first: int = 0) -> bool:
    """Whether the memory accelerator can address rows and results: all at multiples of 16 bytes."""
    lengths = (x_TI.stride(0), x_TI.shape[1], weight.num_out, first)
    return all(length % 8 == 0 for length in lengths) and x_TI.data_ptr() % 16 == 0


def packed_prompt_linear(
    x_TI: Tensor, weight: TiledWeight, tile: PromptTile, *, out_dtype: torch.dtype, first: int = 0
) -> Tensor:
    """Summands [S, T, O - first] of ``x · weightᵀ``: the product is their `total`.

    Args:
        x_TI: bfloat16 rows, at least one, as `fits` says. The accelerator puts zeros behind their last input.
        weight: without a leading dimension, of any scaling but EACH.
        tile: of this product.
        out_dtype: of the summands; float32 unless there is only one.
        first: outputs that are left out.
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
    unit = UNITS[weight.code]
    shape = _Shape(
        code=CODES[weight.code],
        scaling=weight.scaling.value,
        words=unit.words,
        blocks=unit.inputs // BLOCK_I.value,
        rows=tile.rows,
        outputs=tile.outputs,
        groups=tile.groups,
        side_by_side=SIDE_BY_SIDE,
        whole=out_dtype == torch.bfloat16,
    )
    words_BOC = weight.words_BOC[:, first:]
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.outputs * tile.groups) * tile.splits
    _packed_prompt_kernel[(min(num_tiles, MULTIPROCESSORS),)](
        TensorDescriptor.from_tensor(x_TI, [tile.rows, BLOCK_I.value], _swizzled(128, rank=2)),
        TensorDescriptor.from_tensor(words_BOC, [1, tile.outputs, unit.words], _swizzled(2 * unit.words, rank=3)),
        weight.scale_BO[..., first:],
        weight.factor_O[first:],
        TensorDescriptor.from_tensor(
            out_STO[0], [tile.rows, tile.outputs], _swizzled(128, 8 * out_dtype.itemsize, rank=2)
        ),
        out_STO,
        num_rows,
        num_out,
        tile.splits,
        weight.words_BOC.shape[0],
        num_tiles,
        weight.scale_BO.stride(0),
        SHAPE=shape,
        MULTIPLY_REGISTERS=MULTIPLY_REGISTERS[tile.groups],
        FETCH_REGISTERS=FETCH_REGISTERS,
        num_warps=4,
    )
    return out_STO


@lru_cache
def _swizzled(num_bytes: int, bits: int = 16, *, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=num_bytes, element_bitwidth=bits, rank=rank)


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
def _fetch_units(x_TI, words_BOC, tiles, barriers, sizes, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """All that the groups of this program multiply, in their order."""
    GROUPS: gl.constexpr = SHAPE.groups
    BLOCKS: gl.constexpr = SHAPE.blocks
    x_tiles, words_tiles, _ = tiles
    ready, free = barriers
    num_rows, num_out, splits, units, num_tiles = sizes
    count = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        split, t, o = _place(tile, num_rows, num_out, SHAPE)
        for unit in range(split * units // splits, (split + 1) * units // splits):
            stage = count % SHAPE.stages
            mbarrier.wait(free.index(stage), ((count // SHAPE.stages) & 1) ^ 1)
            is_there = ready.index(stage)
            mbarrier.expect(
                is_there, SHAPE.blocks * x_TI.block_type.nbytes + SHAPE.groups * words_BOC.block_type.nbytes
            )
            for group in gl.static_range(GROUPS):
                to = words_tiles.index(stage * SHAPE.groups + group)
                _fetch(words_BOC, [unit, o + group * SHAPE.outputs, 0], is_there, to)
            for block in gl.static_range(BLOCKS):
                to = x_tiles.index(stage * SHAPE.blocks + block)
                _fetch(x_TI, [t, (unit * SHAPE.blocks + block) * BLOCK_I], is_there, to)
            count += 1


@gluon.jit  # type: ignore[untyped-decorator]
def _beside(a, b, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Two planes as one tile [O, 2 C]; no number moves between threads."""
    joined = gl.join(a, b).permute((0, 2, 1)).reshape((a.shape[0], 2 * a.shape[1]))
    return gl.convert_layout(joined, LAYOUT, assert_trivial=True)


@gluon.jit
def _times(numbers, scale_O1):  # type: ignore[no-untyped-def]
    """Numbers times float32 scales, rounded to bfloat16; the two of a register are of one output."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .f32 low, high;
        shl.b32 low, $1, 16;
        and.b32 high, $1, 0xFFFF0000;
        mul.f32 low, low, $2;
        mul.f32 high, high, $2;
        cvt.rn.bf16x2.f32 $0, high, low;
        }
        """,
        "=r,r,f,f",
        [numbers, scale_O1],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _halves(words, scale_O1, LAYOUT: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of the first and of the second half of a unit's inputs, of its words [O, C]."""
    if SHAPE.code < 2:
        if SHAPE.code == 1:
            w0, w1, w2, w3 = scaled_e2m1(words, scale_O1)
        elif SHAPE.scaling == 1:
            w0, w1, w2, w3 = scaled_int4(words, scale_O1)
        else:
            w0, w1, w2, w3 = plain_int4(words)
        low = _beside(w0, w1, LAYOUT)
        high = _beside(w2, w3, LAYOUT)
    elif SHAPE.code == 2:
        low, high = int8(words)
    else:
        low, high = e4m3(words)
    if SHAPE.scaling == 2:
        low = _times(low, scale_O1)
        high = _times(high, scale_O1)
    return low, high


@gluon.jit  # type: ignore[untyped-decorator]
def _store(acc, out_tiles, weight, results, place, sizes, GROUP: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store a tile's sums [O, T]: those of bfloat16 by way of shared memory, where outputs come to lie side by side."""
    _, factor_O, _ = weight
    out_TO, out_STO = results
    split, t, o = place
    num_rows, num_out, _, _, _ = sizes
    LAYOUT: gl.constexpr = acc.type.layout
    o_O = o + gl.arange(0, SHAPE.outputs, gl.SliceLayout(1, LAYOUT))
    acc *= gl.load(factor_O + gl.minimum(o_O, num_out - 1)).expand_dims(1)
    if SHAPE.whole:
        out = out_tiles.index(GROUP)
        tma.store_wait(0)
        _barrier()
        out.permute((1, 0)).store(acc.to(out.dtype))
        fence_async_shared()
        _barrier()
        _write(out_TO, [t, o], out)
    else:
        t_T = t + gl.arange(0, SHAPE.rows, gl.SliceLayout(0, LAYOUT))
        at_T = out_STO + (split * num_rows + t_T).to(gl.int64) * num_out
        is_there = (t_T < num_rows)[None, :] & (o_O < num_out)[:, None]
        gl.store(at_T[None, :] + o_O[:, None], acc, mask=is_there)


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply(tiles, barriers, weight, results, sizes, GROUP: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of one group, tile after tile."""
    ROWS: gl.constexpr = SHAPE.rows
    OUTPUTS: gl.constexpr = SHAPE.outputs
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    NUMBERS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    x_tiles, words_tiles, out_tiles = tiles
    scale_BO, _, scale_stride = weight
    ready, free = barriers
    num_rows, num_out, splits, units, num_tiles = sizes
    count = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        split, t, o = _place(tile, num_rows, num_out, SHAPE)
        o += GROUP * OUTPUTS
        # Past the end the last output is computed again, and not stored.
        o_O = gl.minimum(o + gl.arange(0, OUTPUTS, gl.SliceLayout(1, NUMBERS)), num_out - 1)
        first = split * units // splits
        end = (split + 1) * units // splits
        scales = o_O  # a name, where there are none
        if SHAPE.scaling > 0:
            scales = gl.load(scale_BO + first * scale_stride + o_O)
        acc = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
        for unit in range(first, end):
            stage = count % SHAPE.stages
            mbarrier.wait(ready.index(stage), (count // SHAPE.stages) & 1)
            words = words_tiles.index(stage * SHAPE.groups + GROUP).reshape((OUTPUTS, SHAPE.words)).load(NUMBERS)
            low, high = _halves(words, scales.expand_dims(1), NUMBERS, SHAPE)
            if SHAPE.scaling > 0:
                scales = gl.load(scale_BO + gl.minimum(unit + 1, end - 1) * scale_stride + o_O)
            if SHAPE.blocks == 1:
                numbers = _beside(low, high, NUMBERS)
                acc = warpgroup_mma(numbers, x_tiles.index(stage).permute((1, 0)), acc, is_async=True)
                acc, numbers = warpgroup_mma_wait(0, deps=(acc, numbers))
            else:
                acc = warpgroup_mma(low, x_tiles.index(2 * stage).permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma(high, x_tiles.index(2 * stage + 1).permute((1, 0)), acc, is_async=True)
                acc, low, high = warpgroup_mma_wait(0, deps=(acc, low, high))
            # Every warp of the group has done with the unit: it may be overwritten.
            _barrier()
            mbarrier.arrive(free.index(stage))
            count += 1
        _store(acc, out_tiles, weight, results, (split, t, o), sizes, GROUP, SHAPE)
    if SHAPE.whole:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "splits", "units", "num_tiles"])  # type: ignore[untyped-decorator]
def _packed_prompt_kernel(  # type: ignore[no-untyped-def]
    x_TI,
    words_BOC,
    scale_BO,
    factor_O,
    out_TO,
    out_STO,
    num_rows,
    num_out,
    splits,
    units,
    num_tiles,
    scale_stride,
    SHAPE: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    x_tiles = gl.allocate_shared_memory(x_TI.dtype, [SHAPE.stages * SHAPE.blocks, SHAPE.rows, BLOCK_I], x_TI.layout)
    words_tiles = gl.allocate_shared_memory(
        words_BOC.dtype, [SHAPE.stages * SHAPE.groups, 1, SHAPE.outputs, SHAPE.words], words_BOC.layout
    )
    out_tiles = x_tiles  # a name, where results are stored as they are
    if SHAPE.whole:
        out_tiles = gl.allocate_shared_memory(out_TO.dtype, [SHAPE.groups, SHAPE.rows, SHAPE.outputs], out_TO.layout)
    ready = gl.allocate_shared_memory(gl.int64, [SHAPE.stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SHAPE.stages, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = SHAPE.stages
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=SHAPE.groups)
    fence_async_shared()
    _barrier()
    tiles = (x_tiles, words_tiles, out_tiles)
    barriers = (ready, free)
    weight = (scale_BO, factor_O, scale_stride)
    results = (out_TO, out_STO)
    sizes = (num_rows, num_out, splits, units, num_tiles)
    if SHAPE.groups == 2:
        gl.warp_specialize(
            [
                (_multiply, (tiles, barriers, weight, results, sizes, 0, SHAPE)),
                (_multiply, (tiles, barriers, weight, results, sizes, 1, SHAPE)),
                (_fetch_units, (x_TI, words_BOC, tiles, barriers, sizes, SHAPE)),
            ],
            [4, 1],
            [MULTIPLY_REGISTERS, FETCH_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (tiles, barriers, weight, results, sizes, 0, SHAPE)),
                (_multiply, (tiles, barriers, weight, results, sizes, 1, SHAPE)),
                (_multiply, (tiles, barriers, weight, results, sizes, 2, SHAPE)),
                (_fetch_units, (x_TI, words_BOC, tiles, barriers, sizes, SHAPE)),
            ],
            [4, 4, 1],
            [MULTIPLY_REGISTERS, MULTIPLY_REGISTERS, FETCH_REGISTERS],
        )
