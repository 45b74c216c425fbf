"""Gated products of few rows with weights of four bits, for sm_90, whose steps resident programs share evenly.

`packed_kernels.shares` measures it; nothing serves it. Weights come ahead of their rows as in `packed_ahead`, but all
programs are there at once, and each takes an equal run of steps, whatever tiles they belong to: where a run ends within
a tile, the next program goes on from the sums so far. A program begins with the tile that it leaves to the next one and
ends with the one that it takes over, whose sums have long been there by then. So every sum runs in the order of
`packed_linear`: a row has the same bits.

A run is no shorter than a tile, so a program writes the sums that it leaves before it waits for any. It waits for the
program before it alone: devices start programs in their order, though nothing promises that they do.

Eight outputs of gate and the eight of up that they gate lie in the registers of the same threads.

Shape legend: T rows, H inputs, I outputs, B units, O outputs of a tile of gate or up, C words of a unit, R rows of W
words of several outputs, X scales of a unit as int32, G gate and up, P programs.
"""

# A kernel's arguments have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

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
from gemray_kernels.triton.early_start import let_next_start, starts_early, wait_having_let
from gemray_kernels.triton.gluon_ring import (
    barrier,
    fetch,
    in_wide_rows,
    next_stage,
    ring_barriers,
    store_sums,
    swizzled,
    viewed,
)
from gemray_kernels.triton.packed_ahead import FETCH_REGISTERS, HALF_I, ROWS, UNIT_INPUTS, WIDE_WORDS
from gemray_kernels.triton.packed_linear import CODES
from gemray_kernels.triton.packed_prompt_numbers import numbers_of_half
from gemray_kernels.triton.packed_prompts import fits


@dataclass(frozen=True)
class SharesTile:
    """What one program holds, and how many of them share a product."""

    outputs: int
    """Outputs of gate, and as many of up: a power of two, and 8 or more for each warp that multiplies."""
    num_warps: int
    num_stages: int
    programs: int
    """Programs that all find room at once, no more than the product has tiles."""
    most_registers: int
    """Registers of a thread: those of the three warps beside the fetching one are left to those that multiply."""

    def __str__(self) -> str:
        return f"{self.outputs} outputs, {self.num_warps} warps, {self.num_stages} stages, {self.programs} programs"


@dataclass(frozen=True)
class _Shape:
    """What the compiler knows of a product."""

    code: int
    words: int
    outputs: int
    stages: int
    scaling: int = Scaling.CODES.value
    """Where scales go, as `packed_prompt_numbers` asks."""
    units: int = 1
    """Units of a step, likewise."""


def no_sums_yet(tile: SharesTile, device: torch.device) -> Tensor:
    """Flags [P] that say whether sums are there for a program to go on from; every product leaves them at zero."""
    return torch.zeros(tile.programs, dtype=torch.int32, device=device)


def packed_gelu_in_shares(x_TH: Tensor, weight: TiledWeight, tile: SharesTile, are_there_P: Tensor) -> Tensor:
    """``gelu(x · gateᵀ) · (x · upᵀ)`` [T, I] of ``weight = [gate; up]``, rounded as separate kernels round.

    Args:
        x_TH: at most 8 bfloat16 rows, at least one, as `packed_prompts.fits` says.
        weight: of four bits, in units of 128 inputs, with scales of codes.
        tile: of this product.
        are_there_P: `no_sums_yet`, which no other product uses at the same time.

    Raises:
        ValueError: rows, a weight or a tile that the kernel is not for.
    """
    num_rows, num_in = x_TH.shape
    width = weight.num_out // 2
    tiles = triton.cdiv(width, tile.outputs)
    is_four_bits = weight.code in ("int4", "nvfp4") and weight.scaling == Scaling.CODES
    if not (is_four_bits and weight.unit.inputs == UNIT_INPUTS and tile.programs <= tiles):
        raise ValueError(
            f"a weight of {weight.code} with {weight.scaling} in units of {weight.unit.inputs} inputs, and {tiles} "
            f"tiles for {tile.programs} programs: int4 or nvfp4 with scales of codes in units of {UNIT_INPUTS}, and a "
            f"tile a program or more, are allowed"
        )
    allowed = 0 < num_rows <= ROWS.value and x_TH.stride(1) == 1 and num_in == weight.num_in
    if not (allowed and fits(x_TH, weight, width)):
        raise ValueError(
            f"x {list(x_TH.shape)} with strides {x_TH.stride()} and a weight of {weight.num_in} inputs: 1 to "
            f"{ROWS.value} rows of as many, one beside the other, are allowed, all at multiples of 16 bytes"
        )
    words = weight.unit.words
    units = len(weight.words_BOC)
    words_BGRW = weight.words_BOC.view(units, 2, -1, WIDE_WORDS.value)
    scale_BGX = weight.scale_BO.view(torch.int32).view(units, 2, -1)
    block = [1, 2, tile.outputs * words // WIDE_WORDS.value, WIDE_WORDS.value]
    out_1TI = torch.empty(1, num_rows, width, dtype=x_TH.dtype, device=x_TH.device)
    sums = torch.empty(tile.programs, 2 * tile.outputs, ROWS.value, dtype=torch.float32, device=x_TH.device)
    early = starts_early(x_TH)
    _packed_shares_kernel[(tile.programs,)](
        TensorDescriptor.from_tensor(x_TH, [ROWS.value, HALF_I.value], swizzled(128, rank=2)),
        TensorDescriptor.from_tensor(words_BGRW, block, swizzled(128, rank=4)),
        TensorDescriptor.from_tensor(scale_BGX, [1, 2, 2 * tile.outputs], swizzled(0, 32, rank=3)),
        weight.factor_O,
        out_1TI,
        sums,
        are_there_P,
        num_rows,
        width,
        units,
        tiles,
        SHAPE=_Shape(code=CODES[weight.code], words=words, outputs=tile.outputs, stages=tile.num_stages),
        EARLY=early,
        FETCH_REGISTERS=FETCH_REGISTERS,
        num_warps=tile.num_warps,
        maxnreg=tile.most_registers,
        launch_pdl=early,
    )
    return out_1TI[0]


@gluon.constexpr_function
def _in_pairs(output):
    """Where an output of gate lies among those of both: eight of gate come before eight of up, and so on, so that the
    thread that has one's sums has those of its fellow."""
    return output // 8 * 16 + output % 8


@gluon.constexpr_function
def _words_in_pairs(num_out, num_words):
    """How words [2 O, C] of two tiles lie, one tile behind the other, each as `in_wide_rows` says."""
    rows = [[_in_pairs(output), word] for output, word in in_wide_rows(num_out, num_words).offset_bases]
    return gl.SharedLinearLayout([*rows, [8, 0]])


@gluon.constexpr_function
def _scales_in_pairs(num_out):
    """How scales [2 O] of two tiles lie, one tile behind the other."""
    outputs = [[_in_pairs(1 << bit)] for bit in range(num_out.bit_length() - 1)]
    return gl.SharedLinearLayout([*outputs, [8]])


@gluon.jit
def _piece(number, share):
    """Tile of a piece of a program's run, its first unit and the one behind its last: the run's last tile comes first,
    its first one last."""
    begin, end, units, first, last = share
    tile = gl.where(number == 0, last, gl.where(number == last - first, first, first + number))
    return tile, gl.maximum(begin - tile * units, 0), gl.minimum(end - tile * units, units)


@gluon.jit
def _next_step(number, unit, share):
    """Piece and unit of the step behind one."""
    ends = unit + 1 == _piece(number, share)[2]
    number = gl.where(ends, number + 1, number)
    return number, gl.where(ends, _piece(number, share)[1], unit + 1)


@gluon.jit
def _fetch_weight(descriptors, place, stage, tiles, ready, SHAPE: gl.constexpr):
    """Ask for codes and scales of a step, whose barrier expects its rows, too."""
    _, words_BGRW, scale_BGX = descriptors
    SIZE: gl.constexpr = words_BGRW.block_type.nbytes + scale_BGX.block_type.nbytes + 4 * ROWS * HALF_I
    _, words_tiles, scale_tiles = tiles
    tile, unit = place
    first = tile * SHAPE.outputs
    is_there = ready.index(stage)
    mbarrier.expect(is_there, SIZE)
    fetch(words_BGRW, [unit, 0, first * SHAPE.words // WIDE_WORDS, 0], is_there, words_tiles.index(stage))
    fetch(scale_BGX, [unit, 0, 2 * first], is_there, scale_tiles.index(stage))


@gluon.jit
def _fetch_rows(descriptors, unit, stage, tiles, ready):
    for half in gl.static_range(2):
        fetch(descriptors[0], [0, (2 * unit + half) * HALF_I], ready.index(stage), tiles[0].index(2 * stage + half))


@gluon.jit
def _fetch_steps(descriptors, tiles, barriers, share, SHAPE: gl.constexpr, EARLY: gl.constexpr):
    """A ring of weights, then, once they are written, the rows to it, and then what follows as places become free."""
    ready, free = barriers
    begin, end, _, _, _ = share
    filled = gl.minimum(SHAPE.stages, end - begin)
    number = 0
    unit = _piece(0, share)[1]
    for step in range(filled):
        _fetch_weight(descriptors, (_piece(number, share)[0], unit), step, tiles, ready, SHAPE)
        number, unit = _next_step(number, unit, share)
    wait_having_let(EARLY)
    number = 0
    unit = _piece(0, share)[1]
    for step in range(filled):
        _fetch_rows(descriptors, unit, step, tiles, ready)
        number, unit = _next_step(number, unit, share)
    stage = 0
    phase = 0
    for _step in range(filled, end - begin):
        mbarrier.wait(free.index(stage), phase)
        _fetch_weight(descriptors, (_piece(number, share)[0], unit), stage, tiles, ready, SHAPE)
        _fetch_rows(descriptors, unit, stage, tiles, ready)
        number, unit = _next_step(number, unit, share)
        stage, phase = next_stage(stage, phase, SHAPE.stages)


@gluon.jit
def _loaded(tiles, stage, SUMS: gl.constexpr, SHAPE: gl.constexpr):
    """Words [2 O, C], scales [2 O] and both halves of the rows [64, T] of a step."""
    NUMBERS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    TILE: gl.constexpr = (2 * SHAPE.outputs, SHAPE.words)
    OUTPUTS: gl.constexpr = (2 * SHAPE.outputs,)
    WORDS: gl.constexpr = _words_in_pairs(SHAPE.outputs, SHAPE.words)
    SCALES: gl.constexpr = _scales_in_pairs(SHAPE.outputs)
    x_tiles, words_tiles, scale_tiles = tiles
    words = viewed(words_tiles.index(stage), TILE, WORDS).load(NUMBERS)
    scales = viewed(scale_tiles.index(stage), OUTPUTS, SCALES, gl.int64).load(gl.SliceLayout(1, NUMBERS))
    x_low = x_tiles.index(2 * stage).permute((1, 0)).load(RIGHT)
    x_high = x_tiles.index(2 * stage + 1).permute((1, 0)).load(RIGHT)
    return words, scales, x_low, x_high


@gluon.jit
def _added(acc, step, SHAPE: gl.constexpr):
    """Sums [2 O, T] and the products of a step."""
    NUMBERS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    words, scales, x_low, x_high = step
    acc = mma_v2(numbers_of_half(words, scales, 0, NUMBERS, SHAPE), x_low, acc)
    return mma_v2(numbers_of_half(words, scales, 1, NUMBERS, SHAPE), x_high, acc)


@gluon.jit
def _sums_at(sums, program, LAYOUT: gl.constexpr, OUTPUTS: gl.constexpr):
    """Where the sums [2 O, T] lie from which a program goes on."""
    o_O = gl.arange(0, 2 * OUTPUTS, gl.SliceLayout(1, LAYOUT))
    t_T = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    return sums + program * (2 * OUTPUTS * ROWS) + o_O[:, None] * ROWS + t_T[None, :]


@gluon.jit
def _take(is_there):
    """Wait until sums are there, and say that they are not for the next product."""
    found = gl.atomic_cas(is_there, 1, 0, sem="acquire", scope="gpu")
    while found == 0:
        found = gl.atomic_cas(is_there, 1, 0, sem="acquire", scope="gpu")


@gluon.jit
def _multiply(tiles, barriers, factor_I, out_1TI, sums, are_there_P, num_rows, num_out, share, SHAPE: gl.constexpr):
    OUTPUTS: gl.constexpr = SHAPE.outputs
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 8]
    )
    ready, free = barriers
    _, _, units, first, last = share
    program = gl.program_id(0)
    stage = 0
    phase = 0
    for number in range(last - first + 1):
        tile, start, stop = _piece(number, share)
        acc = gl.zeros([2 * OUTPUTS, ROWS], gl.float32, SUMS)
        if start > 0:
            _take(are_there_P + program)
            # Not by way of this multiprocessor's own cache, which may have what was there before.
            acc = gl.load(_sums_at(sums, program, SUMS, OUTPUTS), cache_modifier=".cg")
        for _unit in range(start, stop):
            mbarrier.wait(ready.index(stage), phase)
            step = _loaded(tiles, stage, SUMS, SHAPE)
            # What all warps have in registers may be overwritten.
            barrier()
            mbarrier.arrive(free.index(stage))
            acc = _added(acc, step, SHAPE)
            stage, phase = next_stage(stage, phase, SHAPE.stages)
        if stop < units:
            gl.store(_sums_at(sums, program + 1, SUMS, OUTPUTS), acc)
            # One thread says so for all.
            barrier()
            gl.atomic_xchg(are_there_P + program + 1, 1, sem="release", scope="gpu")
        else:
            gate, up = acc.reshape((OUTPUTS // 8, 2, 8, ROWS)).permute((0, 2, 3, 1)).split()
            gate = gate.reshape((OUTPUTS, ROWS))
            up = up.reshape((OUTPUTS, ROWS))
            o = tile * OUTPUTS
            o_O = o + gl.arange(0, OUTPUTS, gl.SliceLayout(1, gate.type.layout))
            factor_at_O = factor_I + gl.minimum(o_O, num_out - 1)
            gate *= gl.load(factor_at_O).expand_dims(1)
            up *= gl.load(factor_at_O + num_out).expand_dims(1)
            dtype: gl.constexpr = out_1TI.dtype.element_ty
            result = gated_sums(gate, up, dtype, True).to(dtype)
            store_sums(result, None, (None, out_1TI), (0, 0, o), (num_rows, num_out), False)


@gluon.jit(do_not_specialize=["num_rows", "units", "tiles"])
def _packed_shares_kernel(
    x_TH,
    words_BGRW,
    scale_BGX,
    factor_I,
    out_1TI,
    sums,
    are_there_P,
    num_rows,
    num_out,
    units,
    tiles,
    SHAPE: gl.constexpr,
    EARLY: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    STAGES: gl.constexpr = SHAPE.stages
    let_next_start(EARLY)
    words_tiles = gl.allocate_shared_memory(
        gl.int16, [STAGES, 1, 2, SHAPE.outputs * SHAPE.words // WIDE_WORDS, WIDE_WORDS], words_BGRW.layout
    )
    scale_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 2, 2 * SHAPE.outputs], scale_BGX.layout)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, ROWS, HALF_I], x_TH.layout)
    barriers = ring_barriers(1, STAGES)
    fence_async_shared()
    barrier()
    steps = tiles * units
    program = gl.program_id(0)
    begin = program * steps // gl.num_programs(0)
    end = (program + 1) * steps // gl.num_programs(0)
    share = (begin, end, units, begin // units, (end - 1) // units)
    in_shared = (x_tiles, words_tiles, scale_tiles)
    gl.warp_specialize(
        [
            (_multiply, (in_shared, barriers, factor_I, out_1TI, sums, are_there_P, num_rows, num_out, share, SHAPE)),
            (_fetch_steps, ((x_TH, words_BGRW, scale_BGX), in_shared, barriers, share, SHAPE, EARLY)),
        ],
        [1],
        [FETCH_REGISTERS],
    )
