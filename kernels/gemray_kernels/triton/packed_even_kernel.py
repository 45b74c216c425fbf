"""The kernel of `packed_even`: pieces of tiles, one program's after the other.

Steps are those of `packed_prompts`: groups of four warps decode in registers while the tensor cores multiply, and a
warp fetches ahead.

Shape legend: T rows, I inputs, O outputs, S splits of the inputs, B units, C words of a unit, P parts of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gemray_kernels.packed_weight import Scaling
from gemray_kernels.triton.activation import gated_sums
from gemray_kernels.triton.early_start import let_next_start
from gemray_kernels.triton.gluon_ring import barrier, fetch, next_stage, ring_barriers, store_sums
from gemray_kernels.triton.packed_linear import CODES
from gemray_kernels.triton.packed_prompt_numbers import MASKED_E4M3, numbers_of_half, scales_of_step

HALF_I = gl.constexpr(64)
"""Inputs of a tile of rows, half a step's: 128 bytes, as in `packed_prompts`."""
SHARED_BYTES = 226 * 1024
"""What a program's tiles may take; barriers have the rest of what there is."""
WORDS_STAGES = gl.constexpr(2)
"""Steps of which words are at hand."""
MOST_ROW_STAGES = 12


@dataclass(frozen=True)
class EvenShape:
    """What the compiler knows of a product."""

    code: int
    scaling: int
    words: int
    units: int
    """Units of a step. The second of two may lie behind the last one: its words and rows are zeros then."""
    rows: int
    more: int
    outputs: int
    groups: int
    gate: int
    whole: bool
    """There is one summand, which is rounded to bfloat16."""

    @property
    def masked(self) -> bool:
        """Whether e4m3's numbers stay as they are masked out of their words."""
        return self.code == CODES["fp8"] and self.scaling == Scaling.ROW.value

    @property
    def boxed(self) -> int:
        """Groups whose words come by one request: tiles have sizes that are powers of two."""
        return 1 if self.groups == 3 else self.groups

    @property
    def results(self) -> int:
        """Results of a group's tile."""
        return self.outputs // 2 if self.gate else self.outputs

    @property
    def row_stages(self) -> int:
        """Tiles of rows that shared memory has room for."""
        rows = self.rows + self.more
        results = 2 * self.groups * rows * self.results if self.whole else 0
        words = 2 * WORDS_STAGES.value * self.groups * self.units * self.outputs * self.words
        return int(min(MOST_ROW_STAGES, (SHARED_BYTES - results - words) // (2 * rows * HALF_I.value)))


@gluon.jit  # type: ignore[untyped-decorator]
def _piece(number, sizes, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """A piece of a program: its tile, split, first and end step, and whether it is of a tile that is left over.

    A share of what is left over lies in two tiles at most; a piece of it may have no steps.
    """
    _, num_out, splits, steps, tiles, rounds, rest = sizes
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    out_tiles = gl.cdiv(num_out, SHAPE.groups * SHAPE.results)
    tile = number * programs + program
    split = tile // out_tiles
    first = split * steps // splits
    end = gl.where(tile < tiles, (split + 1) * steps // splits, first)
    tile = tile % out_tiles
    is_rest = number >= rounds
    from_step = program * rest * steps // programs
    to_step = (program + 1) * rest * steps // programs
    of_rest = from_step // steps + number - rounds
    tile = gl.where(is_rest, rounds * programs + of_rest, tile)
    first = gl.where(is_rest, gl.maximum(from_step - of_rest * steps, 0), first)
    end = gl.where(is_rest, gl.minimum(to_step - of_rest * steps, steps), end)
    return tile, split, first, end, is_rest


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_steps(x_TI, more_TI, words_BOC, tiles, barriers, sizes, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """All that the groups of this program multiply, in their order."""
    x_tiles, more_tiles, words_tiles, _, _ = tiles
    x_ready, x_free, words_ready, words_free = barriers
    rounds, rest = sizes[5], sizes[6]
    STAGES: gl.constexpr = SHAPE.row_stages
    BOXES: gl.constexpr = SHAPE.groups // SHAPE.boxed
    x_stage = 0
    x_phase = 1
    words_stage = 0
    words_phase = 1
    for number in range(rounds + 2 * gl.minimum(rest, 1)):
        piece = _piece(number, sizes, SHAPE)
        o = piece[0] * (SHAPE.groups * SHAPE.results)
        for step in range(piece[2], piece[3]):
            mbarrier.wait(words_free.index(words_stage), words_phase)
            is_there = words_ready.index(words_stage)
            mbarrier.expect(is_there, BOXES * words_BOC.block_type.nbytes)
            for box in gl.static_range(BOXES):
                to = words_tiles.index(words_stage * BOXES + box)
                if SHAPE.gate:
                    at = o // 8 + box * (SHAPE.boxed * SHAPE.results // 8)
                    fetch(words_BOC, [step * SHAPE.units, at, 0, 0, 0], is_there, to)
                else:
                    at = o + box * (SHAPE.boxed * SHAPE.results)
                    fetch(words_BOC, [step * SHAPE.units, at, 0], is_there, to)
            words_stage, words_phase = next_stage(words_stage, words_phase, WORDS_STAGES)
            for half in gl.static_range(2):
                mbarrier.wait(x_free.index(x_stage), x_phase)
                is_there = x_ready.index(x_stage)
                i = (2 * step + half) * HALF_I
                if SHAPE.more:
                    mbarrier.expect(is_there, x_TI.block_type.nbytes + more_TI.block_type.nbytes)
                    fetch(more_TI, [SHAPE.rows, i], is_there, more_tiles.index(x_stage))
                else:
                    mbarrier.expect(is_there, x_TI.block_type.nbytes)
                fetch(x_TI, [0, i], is_there, x_tiles.index(x_stage))
                x_stage, x_phase = next_stage(x_stage, x_phase, STAGES)


@gluon.jit  # type: ignore[untyped-decorator]
def _words(words_tiles, stage, GROUP: gl.constexpr, LAYOUT: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Words [O, C] that each half of a group's step is made of."""
    BOX_O: gl.constexpr = SHAPE.boxed * SHAPE.outputs
    FIRST: gl.constexpr = GROUP % SHAPE.boxed * SHAPE.outputs
    box = stage * (SHAPE.groups // SHAPE.boxed) + GROUP // SHAPE.boxed
    in_box = words_tiles.index(box).reshape((SHAPE.units * BOX_O, SHAPE.words))
    low = in_box.slice(FIRST, SHAPE.outputs).load(LAYOUT)
    high = low
    if SHAPE.units == 2:
        high = in_box.slice(BOX_O + FIRST, SHAPE.outputs).load(LAYOUT)
    return low, high


@gluon.jit  # type: ignore[untyped-decorator]
def _outputs(o, num_out, LAYOUT: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Which outputs [O] a group's tile has, whose first result is `o`. Past the end there is the last result again."""
    r_O = gl.arange(0, SHAPE.outputs, gl.SliceLayout(1, LAYOUT))
    if SHAPE.gate:
        o_O = gl.minimum(o + r_O // 16 * 8 + r_O % 8, num_out - 1) + r_O // 8 % 2 * num_out
    else:
        o_O = gl.minimum(o + r_O, num_out - 1)
    return o_O


@gluon.jit  # type: ignore[untyped-decorator]
def _store(acc, out_tile, results, factor_O, place, sizes, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Scale a tile's sums [O, T], gate them if they are to be, and store them at their split, first row and result."""
    num_rows, num_out = sizes[0], sizes[1]
    if SHAPE.masked:
        acc *= MASKED_E4M3
    LAYOUT: gl.constexpr = acc.type.layout
    o_O = _outputs(place[2], num_out, LAYOUT, SHAPE)
    acc *= gl.load(factor_O + o_O).expand_dims(1)
    if SHAPE.gate:
        pairs = acc.reshape((SHAPE.outputs // 16, 2, 8, acc.shape[1])).permute((0, 2, 3, 1))
        gate, up = gl.split(pairs)
        acc = gated_sums(gate, up, gl.bfloat16, SHAPE.gate == 1).reshape((SHAPE.results, acc.shape[1]))
    store_sums(acc, out_tile, results, place, (num_rows, num_out), SHAPE.whole)


@gluon.jit  # type: ignore[untyped-decorator]
def _store_part(acc, to, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store a part's sums [O, T] as they are, from `to` on."""
    LAYOUT: gl.constexpr = acc.type.layout
    o_O = gl.arange(0, SHAPE.outputs, gl.SliceLayout(1, LAYOUT))
    t_T = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    gl.store(to + (o_O * (SHAPE.rows + SHAPE.more))[:, None] + t_T[None, :], acc)


@gluon.jit  # type: ignore[untyped-decorator]
def _sums(tiles, barriers, weight, place, ring, GROUP: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """A group's sums [O, T] of a piece, those of the rows behind, and the stages behind it with their phases.

    A half is decoded while the one before it is multiplied.
    """
    ROWS: gl.constexpr = SHAPE.rows
    OUTPUTS: gl.constexpr = SHAPE.outputs
    MORE: gl.constexpr = SHAPE.more if SHAPE.more else 8
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    NUMBERS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    MORE_SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, MORE, 16]
    )
    MORE_NUMBERS: gl.constexpr = gl.DotOperandLayout(0, MORE_SUMS, 2)
    x_tiles, more_tiles, words_tiles, _, _ = tiles
    x_ready, x_free, words_ready, words_free = barriers
    o, num_out, first, end, last = place
    x_stage, x_phase, words_stage, words_phase = ring
    STAGES: gl.constexpr = SHAPE.row_stages
    PRODUCTS: gl.constexpr = 2 if SHAPE.more else 1
    o_O = _outputs(o, num_out, NUMBERS, SHAPE)
    low_scales, high_scales = scales_of_step(weight, gl.minimum(first, last), o_O, SHAPE)
    next_low, next_high = scales_of_step(weight, gl.minimum(first + 1, last), o_O, SHAPE)
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
    more = gl.zeros([OUTPUTS, MORE], gl.float32, MORE_SUMS)
    mbarrier.wait(words_ready.index(words_stage), words_phase, pred=first < end)
    low_words, high_words = _words(words_tiles, words_stage, GROUP, NUMBERS, SHAPE)
    low = numbers_of_half(low_words, low_scales, 0, NUMBERS, SHAPE)
    for step in range(first, end):
        mbarrier.wait(x_ready.index(x_stage), x_phase)
        acc = warpgroup_mma(low, x_tiles.index(x_stage).permute((1, 0)), acc, is_async=True)
        if SHAPE.more:
            low_more = gl.convert_layout(low, MORE_NUMBERS, assert_trivial=True)
            more = warpgroup_mma(low_more, more_tiles.index(x_stage).permute((1, 0)), more, is_async=True)
        high_stage, high_phase = next_stage(x_stage, x_phase, STAGES)
        high = numbers_of_half(high_words, high_scales, 1, NUMBERS, SHAPE)
        mbarrier.wait(x_ready.index(high_stage), high_phase)
        acc = warpgroup_mma(high, x_tiles.index(high_stage).permute((1, 0)), acc, is_async=True)
        if SHAPE.more:
            high_more = gl.convert_layout(high, MORE_NUMBERS, assert_trivial=True)
            more = warpgroup_mma(high_more, more_tiles.index(high_stage).permute((1, 0)), more, is_async=True)
        low_scales = next_low
        high_scales = next_high
        next_low, next_high = scales_of_step(weight, gl.minimum(step + 2, last), o_O, SHAPE)
        acc, more, low = warpgroup_mma_wait(PRODUCTS, deps=(acc, more, low))
        # What every warp of the group has done with may be overwritten.
        barrier()
        mbarrier.arrive(words_free.index(words_stage))
        mbarrier.arrive(x_free.index(x_stage))
        words_stage, words_phase = next_stage(words_stage, words_phase, WORDS_STAGES)
        # Behind the last step there may be nothing: what is read then is not used.
        mbarrier.wait(words_ready.index(words_stage), words_phase, pred=step + 1 < end)
        low_words, high_words = _words(words_tiles, words_stage, GROUP, NUMBERS, SHAPE)
        low = numbers_of_half(low_words, low_scales, 0, NUMBERS, SHAPE)
        # Were a product to run on into the next step, the assembler would let none run beside others.
        acc, more, high = warpgroup_mma_wait(0, deps=(acc, more, high))
        barrier()
        mbarrier.arrive(x_free.index(high_stage))
        x_stage, x_phase = next_stage(high_stage, high_phase, STAGES)
    return acc, more, x_stage, x_phase, words_stage, words_phase


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply(tiles, barriers, weight, results, sizes, GROUP: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """The results of one group, piece after piece."""
    out_TO, more_TO, out_STO, parts_P = results
    num_out, steps, rounds, rest = sizes[1], sizes[3], sizes[5], sizes[6]
    factor_O = weight[1]
    x_stage = 0
    x_phase = 0
    words_stage = 0
    words_phase = 0
    for number in range(rounds + 2 * gl.minimum(rest, 1)):
        tile, split, first, end, is_rest = _piece(number, sizes, SHAPE)
        o = (tile * SHAPE.groups + GROUP) * SHAPE.results
        place = (o, num_out, first, end, steps - 1)
        acc, more, x_stage, x_phase, words_stage, words_phase = _sums(
            tiles, barriers, weight, place, (x_stage, x_phase, words_stage, words_phase), GROUP, SHAPE
        )
        if is_rest:
            if end > first:
                slot = 2 * gl.program_id(0) + number - rounds
                to = parts_P + (slot * SHAPE.groups + GROUP) * (SHAPE.outputs * (SHAPE.rows + SHAPE.more))
                _store_part(acc, to, SHAPE)
                if SHAPE.more:
                    _store_part(more, to + SHAPE.rows, SHAPE)
        elif end > first:
            _store(acc, tiles[3].index(GROUP), (out_TO, out_STO), factor_O, (split, 0, o), sizes, SHAPE)
            if SHAPE.more:
                at = (split, SHAPE.rows, o)
                _store(more, tiles[4].index(GROUP), (more_TO, out_STO), factor_O, at, sizes, SHAPE)
    if SHAPE.whole:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "splits", "steps", "tiles", "rounds", "rest", "last_unit"])  # type: ignore[untyped-decorator]
def packed_even_kernel(  # type: ignore[no-untyped-def]
    x_TI,
    more_TI,
    words_BOC,
    scale_BO,
    factor_O,
    out_TO,
    more_TO,
    out_STO,
    parts_P,
    num_rows,
    num_out,
    splits,
    steps,
    tiles,
    rounds,
    rest,
    last_unit,
    scale_stride,
    SHAPE: gl.constexpr,
    LATE: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Every program's pieces (`packed_even`)."""
    STAGES: gl.constexpr = SHAPE.row_stages
    BOXES: gl.constexpr = WORDS_STAGES * SHAPE.groups // SHAPE.boxed
    x_tiles = gl.allocate_shared_memory(x_TI.dtype, [STAGES, SHAPE.rows, HALF_I], x_TI.layout)
    BOX: gl.constexpr = words_BOC.block_type.shape
    words_tiles = gl.allocate_shared_memory(words_BOC.dtype, [BOXES] + BOX, words_BOC.layout)  # noqa: RUF005 - no stars
    # Names, where there is nothing to hold.
    more_tiles = x_tiles
    out_tiles = x_tiles
    more_out_tiles = x_tiles
    if SHAPE.more:
        more_tiles = gl.allocate_shared_memory(x_TI.dtype, [STAGES, SHAPE.more, HALF_I], x_TI.layout)
    if SHAPE.whole:
        out_tiles = gl.allocate_shared_memory(out_TO.dtype, [SHAPE.groups, SHAPE.rows, SHAPE.results], out_TO.layout)
        if SHAPE.more:
            more_out_tiles = gl.allocate_shared_memory(
                out_TO.dtype, [SHAPE.groups, SHAPE.more, SHAPE.results], out_TO.layout
            )
    x_ready, x_free = ring_barriers(SHAPE.groups, STAGES)
    words_ready, words_free = ring_barriers(SHAPE.groups, WORDS_STAGES)
    fence_async_shared()
    barrier()
    let_next_start(LATE)
    all_tiles = (x_tiles, more_tiles, words_tiles, out_tiles, more_out_tiles)
    barriers = (x_ready, x_free, words_ready, words_free)
    weight = (scale_BO, factor_O, last_unit, scale_stride)
    results = (out_TO, more_TO, out_STO, parts_P)
    sizes = (num_rows, num_out, splits, steps, tiles, rounds, rest)
    if SHAPE.groups == 2:
        gl.warp_specialize(
            [
                (_multiply, (all_tiles, barriers, weight, results, sizes, 0, SHAPE)),
                (_multiply, (all_tiles, barriers, weight, results, sizes, 1, SHAPE)),
                (_fetch_steps, (x_TI, more_TI, words_BOC, all_tiles, barriers, sizes, SHAPE)),
            ],
            [4, 1],
            [MULTIPLY_REGISTERS, FETCH_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (all_tiles, barriers, weight, results, sizes, 0, SHAPE)),
                (_multiply, (all_tiles, barriers, weight, results, sizes, 1, SHAPE)),
                (_multiply, (all_tiles, barriers, weight, results, sizes, 2, SHAPE)),
                (_fetch_steps, (x_TI, more_TI, words_BOC, all_tiles, barriers, sizes, SHAPE)),
            ],
            [4, 4, 1],
            [MULTIPLY_REGISTERS, MULTIPLY_REGISTERS, FETCH_REGISTERS],
        )
