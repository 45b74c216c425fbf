"""Products of one row with weights of four bits, for sm_90, whose scales are multiplied with sums instead of numbers.

A tile of the tensor cores has eight columns, one for each of eight rows. Where there is one row, column n takes that
row's inputs of step n of a unit, sixteen, and zeros for the others; so a column's sum is over inputs of one scale,
which is multiplied with it in float32. Numbers stay as they are masked out of their words, and are not rounded at all:
sums are nearer to those of the packed numbers than those of `packed_linear`, int4's by three orders of magnitude, and
have other bits. A step takes as long as decoding, multiplying and reading shared memory, all of which are less here
(`benchmarks/results/2026-11-30-h200-columns`).

Cuts, and the fetching of weights before the row is there, are those of `packed_ahead`.

Shape legend: T rows (one), H inputs of a gated product, I inputs, O outputs, S splits of the inputs, N columns, K
inputs of half a unit, J inputs of a step.
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
from gemray_kernels.triton.gluon_ring import barrier, in_wide_rows, next_stage, ring_barriers, swizzled, viewed
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_linear import CODES
from gemray_kernels.triton.packed_planes import unscaled_e2m1, unscaled_int4
from gemray_kernels.triton.packed_prompt_numbers import beside
from gemray_kernels.triton.packed_prompts import fits
from gemray_kernels.triton.packed_ring import UNIT_INPUTS, fetch_steps, require_units, weight_descriptors, weight_tiles

COLUMNS = gl.constexpr(8)
STEP_I = gl.constexpr(16)
"""Inputs that the tensor cores take at a time."""
LARGER = gl.constexpr(2.0**64)
"""What the row is multiplied with, as masked numbers are 2^-126 (e2m1) or 2^-133 (int4) of themselves, so that products
are no subnormal numbers. Scales have powers of two, too: a column's sum is 2^56 (e2m1) or 2^43 (int4) of itself, and
infinite if it is 2^72 or more. An infinite input makes all outputs NaN, as idle columns have zeros of it."""
_INT4 = gl.constexpr(CODES["int4"])


@dataclass(frozen=True)
class _Shape:
    """What the compiler knows of a product, as `packed_ahead` asks."""

    code: int
    words: int
    outputs: int
    stages: int
    gate: int
    scaling: int = Scaling.CODES.value

    @property
    def tiles(self) -> int:
        """Tiles of outputs."""
        return 2 if self.gate else 1


def serves(weight: TiledWeight) -> bool:
    """Whether the kernel decodes such a weight."""
    return weight.scaling is Scaling.CODES and weight.unit.inputs == UNIT_INPUTS


def packed_linear_in_columns(
    x_TI: Tensor, weight: TiledWeight, tile: AheadTile, *, out_dtype: torch.dtype, first: int = 0
) -> Tensor:
    """Summands [S, 1, O - first] of ``x · weightᵀ``: the product is their `total`.

    Args:
        x_TI: one bfloat16 row, as `packed_prompts.fits` says.
        weight: of int4 or nvfp4 without a leading dimension, in units of 128 inputs, with scales of codes.
        tile: of this product.
        out_dtype: of the summands; float32 unless there is only one.
        first: outputs that are left out.

    Raises:
        ValueError: rows or a weight that the kernel is not for.
    """
    num_out = weight.num_out - first
    out_STO = torch.empty(tile.splits, len(x_TI), num_out, dtype=out_dtype, device=x_TI.device)
    _launch(x_TI, weight, first, out_STO, tile, Gate.NONE)
    return out_STO


def packed_gated_linear_in_columns(x_TH: Tensor, weight: TiledWeight, tile: AheadTile, gate: Gate) -> Tensor:
    """``act(x · gateᵀ) · (x · upᵀ)`` [1, I] of ``weight = [gate; up]``, rounded as separate kernels round.

    Args:
        x_TH: as for `packed_linear_in_columns`.
        weight: likewise.
        tile: of this product, which is one part.
        gate: GELU or SILU.

    Raises:
        ValueError: as there, and for another tile.
    """
    require_one_part(tile)
    width = weight.num_out // 2
    out_STO = torch.empty(1, len(x_TH), width, dtype=x_TH.dtype, device=x_TH.device)
    _launch(x_TH, weight, 0, out_STO, tile, gate)
    return out_STO[0]


def _launch(x_TI: Tensor, weight: TiledWeight, first: int, out_STO: Tensor, tile: AheadTile, gate: Gate) -> None:
    num_out = out_STO.shape[2]
    if not serves(weight):
        raise ValueError(
            f"a weight of {weight.code} with {weight.scaling} in units of {weight.unit.inputs} inputs: scales of codes "
            f"and units of {UNIT_INPUTS} are allowed"
        )
    allowed = len(x_TI) == 1 and x_TI.stride(1) == 1 and x_TI.shape[1] == weight.num_in
    if not (allowed and fits(x_TI, weight, num_out if gate.value else first)):
        raise ValueError(
            f"x {list(x_TI.shape)} with strides {x_TI.stride()} and a weight of {weight.num_in} inputs: one row of as "
            "many, one beside the other, is allowed, at a multiple of 16 bytes"
        )
    require_units(weight, tile)
    shape = _Shape(CODES[weight.code], weight.unit.words, tile.outputs, tile.num_stages, gate.value)
    early = starts_early(x_TI)
    _packed_columns_kernel[(triton.cdiv(num_out, tile.outputs), tile.splits)](
        TensorDescriptor.from_tensor(x_TI, [1, UNIT_INPUTS], swizzled(0, rank=2)),
        *weight_descriptors(weight, first, tile.outputs),
        weight.factor_O[first:],
        out_STO,
        num_out,
        len(weight.words_BOC),
        SHAPE=shape,
        EARLY=early,
        FETCH_REGISTERS=FETCH_REGISTERS,
        num_warps=NUM_WARPS,
        maxnreg=tile.most_registers,
        launch_pdl=early,
    )


@gluon.constexpr_function
def _row_layout(warps, code):  # type: ignore[no-untyped-def]
    """How registers hold a row's inputs [step, step, J], as halves of a tile [K, N] lie.

    A thread has the sums of two columns. NVFP4's are steps 0 and 2, 1 and 3, and so on, whose scales lie in one word;
    int4's are steps 0 and 1, 2 and 3, and so on, which have one scale.
    """
    idle = [[0, 0, 0]] * (warps.bit_length() - 1)
    first, second = (1, 2) if code == _INT4.value else (2, 1)
    lanes = [[0, 0, 2], [0, 0, 4], [first, 0, 0], [second, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 8], [0, 1, 0], [0, 2, 0]], lanes, idle, [], [8, 4, 16])


@gluon.constexpr_function
def _layout_beside_sums(shape, registers, lanes, warps):  # type: ignore[no-untyped-def]
    """How registers hold scales, of which two registers and four lanes hold an output's, as sums [O, N] lie."""
    tail = [0] * (len(shape) - 1)
    rows = [[1 << bit, *tail] for bit in range(shape[0].bit_length() - 1)]
    num_warps = warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        [*registers, rows[3], *rows[4 + num_warps :]], [*lanes, *rows[:3]], rows[4 : 4 + num_warps], [], shape
    )


@gluon.jit
def _times(x, factor):  # type: ignore[no-untyped-def]
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, factor], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _column_factors(HALF: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """[step, step of the half, J]: LARGER where both are the same, and else zero."""
    ROW: gl.constexpr = _row_layout(gl.num_warps(), SHAPE.code)
    n = gl.arange(0, COLUMNS, gl.SliceLayout(1, gl.SliceLayout(2, ROW)))
    step = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, ROW)))
    factor = gl.where(n[:, None] == step[None, :] + 4 * HALF, LARGER, 0.0).to(gl.bfloat16)
    return factor.expand_dims(2) + gl.full([COLUMNS, 4, STEP_I], 0.0, gl.bfloat16, ROW)


@gluon.jit  # type: ignore[untyped-decorator]
def _plane_factors(SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """[step, J]: LARGER, and 16 times as much in every second plane, which is two steps."""
    ROW: gl.constexpr = _row_layout(gl.num_warps(), SHAPE.code)
    n = gl.arange(0, COLUMNS, gl.SliceLayout(1, gl.SliceLayout(1, ROW)))
    factor = gl.where(n // 2 % 2 == 1, 16 * LARGER, LARGER).to(gl.bfloat16)
    return factor.expand_dims(1) + gl.full([COLUMNS, STEP_I], 0.0, gl.bfloat16, gl.SliceLayout(1, ROW))


@gluon.jit  # type: ignore[untyped-decorator]
def _in_columns(row, factor, RIGHT: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """A row [step, J] as half of a tile [K, N]; no number moves between threads."""
    all_steps = gl.full([COLUMNS, 4, STEP_I], 0, gl.int16, _row_layout(gl.num_warps(), SHAPE.code))
    row = (row.to(gl.int16, bitcast=True).expand_dims(1) | all_steps).to(gl.bfloat16, bitcast=True)
    tile = _times(row, factor)
    if SHAPE.code != _INT4:
        tile = tile.reshape((2, 2, 2, 4 * STEP_I)).permute((0, 2, 1, 3))
    return gl.convert_layout(tile.reshape((COLUMNS, 4 * STEP_I)).permute((1, 0)), RIGHT, assert_trivial=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _offsets(row, factor, RIGHT: gl.constexpr, SUMS: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Sums [O, N] that int4's start with: codes are 8 too large. 0x8008 is -8 · 2^-133."""
    OUTPUTS: gl.constexpr = SHAPE.outputs
    NUMBERS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    eights = gl.full([OUTPUTS, STEP_I], -0x7FF8, gl.int16, NUMBERS).to(gl.bfloat16, bitcast=True)
    tile = gl.convert_layout(_times(row, factor).permute((1, 0)), RIGHT, assert_trivial=True)
    return mma_v2(eights, tile, gl.zeros([OUTPUTS, COLUMNS], gl.float32, SUMS))


@gluon.jit  # type: ignore[untyped-decorator]
def _scales_of_sums(scale_tile, SUMS: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Scales [O, N], as float32."""
    OUTPUTS: gl.constexpr = SHAPE.outputs
    if SHAPE.code == _INT4:
        # [O, plane, step of the plane]
        PLANES: gl.constexpr = _layout_beside_sums([OUTPUTS, 4, 2], [[0, 0, 1]], [[0, 1, 0], [0, 2, 0]], gl.num_warps())
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        scale_OP = viewed(scale_tile, (OUTPUTS, 4), PLAIN, gl.uint16).load(gl.SliceLayout(2, PLANES)).to(gl.int32)
        bits_OPN = (scale_OP << 16).expand_dims(2) + gl.full([1, 1, 2], 0, gl.int32, PLANES)
        bits = bits_OPN.reshape((OUTPUTS, COLUMNS))
        scale = gl.convert_layout(bits, SUMS, assert_trivial=True).to(gl.float32, bitcast=True)
    else:
        # [O, run, half, place in a word], as `packed_tiles` lays them out
        PARTS: gl.constexpr = _layout_beside_sums(
            [OUTPUTS, 2, 2, 2], [[0, 0, 0, 1]], [[0, 1, 0, 0], [0, 0, 1, 0]], gl.num_warps()
        )
        WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        word_ORH = viewed(scale_tile, (OUTPUTS, 2, 2), WORDS, gl.uint16).load(gl.SliceLayout(3, PARTS)).to(gl.int32)
        # A product moves a scale's bits to where they are in a float32.
        place = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, PARTS))))
        moved = gl.where(place == 1, 0x01000100, 0x10000)
        bits = word_ORH.expand_dims(3) * moved.expand_dims(0).expand_dims(0).expand_dims(0)
        bits = bits.permute((0, 2, 1, 3)).reshape((OUTPUTS, COLUMNS))
        scale = _with_three_ones(gl.convert_layout(bits, SUMS, assert_trivial=True))
    return scale


@gluon.jit
def _with_three_ones(bits):  # type: ignore[no-untyped-def]
    """float32 of a scale's bits, 20 to 27, and three ones of the exponent; 0xEA is (a & b) | c."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0x0FF00000, 0x70000000, 0xEA;", "=f,r", [bits], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _added(acc, start, tiles, at, x_low, x_high, NUMBERS: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Sums [O, N] with those of a unit, times their scales."""
    words_tiles, scale_tiles = tiles
    WIDE: gl.constexpr = in_wide_rows(SHAPE.outputs, SHAPE.words)
    TILE: gl.constexpr = (SHAPE.outputs, SHAPE.words)
    SUMS: gl.constexpr = acc.type.layout
    words = viewed(words_tiles.index(at), TILE, WIDE).load(NUMBERS)
    if SHAPE.code == _INT4:
        w0, w1, w2, w3 = unscaled_int4(words)
    else:
        w0, w1, w2, w3 = unscaled_e2m1(words)
    sums = mma_v2(beside(w0, w1, NUMBERS), x_low, start)
    sums = mma_v2(beside(w2, w3, NUMBERS), x_high, sums)
    return acc + sums * _scales_of_sums(scale_tiles.index(at), SUMS, SHAPE)


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply(tiles, x_tiles, barriers, factor_O, out_STO, split, sizes, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    OUTPUTS: gl.constexpr = SHAPE.outputs
    TILES: gl.constexpr = SHAPE.tiles
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 8]
    )
    NUMBERS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, _row_layout(gl.num_warps(), SHAPE.code))
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ready, free = barriers
    first, end, o, num_out = sizes
    low_factor = _column_factors(0, SHAPE)
    high_factor = _column_factors(1, SHAPE)
    plane_factor = _plane_factors(SHAPE)
    acc = gl.zeros([OUTPUTS, COLUMNS], gl.float32, SUMS)
    up = gl.zeros([OUTPUTS, COLUMNS], gl.float32, SUMS)
    stage = 0
    phase = 0
    for _unit in range(first, end):
        mbarrier.wait(ready.index(stage), phase)
        row = viewed(x_tiles.index(stage), (COLUMNS, STEP_I), PLAIN).load(ROW)
        x_low = _in_columns(row, low_factor, RIGHT, SHAPE)
        x_high = _in_columns(row, high_factor, RIGHT, SHAPE)
        start = gl.zeros([OUTPUTS, COLUMNS], gl.float32, SUMS)
        if SHAPE.code == _INT4:
            start = _offsets(row, plane_factor, RIGHT, SUMS, SHAPE)
        acc = _added(acc, start, tiles, stage * TILES, x_low, x_high, NUMBERS, SHAPE)
        if SHAPE.gate:
            up = _added(up, start, tiles, stage * TILES + 1, x_low, x_high, NUMBERS, SHAPE)
        barrier()
        mbarrier.arrive(free.index(stage))
        stage, phase = next_stage(stage, phase, SHAPE.stages)

    o_O = o + gl.arange(0, OUTPUTS, gl.SliceLayout(1, SUMS))
    factor_at_O = factor_O + gl.minimum(o_O, num_out - 1)
    sum_O = gl.sum(acc, 1) * (1 / LARGER) * gl.load(factor_at_O)
    dtype: gl.constexpr = out_STO.dtype.element_ty
    if SHAPE.gate:
        up_O = gl.sum(up, 1) * (1 / LARGER) * gl.load(factor_at_O + num_out)
        sum_O = gated_sums(sum_O, up_O, dtype, SHAPE.gate == 1)
    gl.store(out_STO + split.to(gl.int64) * num_out + o_O, sum_O.to(dtype), mask=o_O < num_out)


@gluon.jit(do_not_specialize=["units"])  # type: ignore[untyped-decorator]
def _packed_columns_kernel(  # type: ignore[no-untyped-def]
    x_TI,
    words_BRW,
    scale_BX,
    factor_O,
    out_STO,
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
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, COLUMNS * STEP_I], x_TI.layout)
    barriers = ring_barriers(1, STAGES)
    fence_async_shared()
    barrier()
    split, sizes = part_of_program(units, num_out, SHAPE)
    gl.warp_specialize(
        [
            (_multiply, (tiles, x_tiles, barriers, factor_O, out_STO, split, sizes, SHAPE)),
            (fetch_steps, (x_TI, words_BRW, scale_BX, tiles, x_tiles, barriers, sizes, SHAPE, EARLY)),
        ],
        [1],
        [FETCH_REGISTERS],
    )
