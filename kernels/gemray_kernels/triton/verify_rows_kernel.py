"""The kernel of `gemray_kernels.triton.verify_rows`: one warp fetches, groups of four warps multiply and store.

Shape legend: T rows, I inputs, O outputs, S summands, U units of 16 weight rows, P pairs.
"""

# Triton looks at annotations: they must not become strings, and a kernel's arguments have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from gemray_kernels.triton.activation import gated_sums
from gemray_kernels.triton.early_start import wait_for_inputs
from gemray_kernels.triton.gluon_ring import barrier, fetch, next_stage, ring_barriers
from gemray_kernels.triton.rows_pieces import BLOCK_I, PIECE, halves, sums_layout

UNIT = gl.constexpr(16)
"""Weight rows of which a thread has two: they are fetched as eight first ones and eight second ones of a pair."""
STORED = gl.constexpr(32)
"""Columns that a group of warps stores at a time: places of more would push sums out of its registers."""


@aggregate
class VerifyProduct:
    """What all warps of a program know."""

    weight: gl.shared_memory_descriptor
    rows_0: gl.shared_memory_descriptor
    rows_1: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    num_pairs: gl.tensor
    num_rows: gl.tensor
    splits: gl.tensor
    blocks: gl.tensor
    tiles: gl.tensor
    GROUPS: gl.constexpr
    PART_0: gl.constexpr
    PART_1: gl.constexpr
    STAGES: gl.constexpr
    GATE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, weight, rows_0, rows_1, ready, free, num_pairs, num_rows, splits, blocks, tiles,
        GROUPS, PART_0, PART_1, STAGES, GATE,
    ):  # fmt: skip
        self.weight = weight
        self.rows_0 = rows_0
        self.rows_1 = rows_1
        self.ready = ready
        self.free = free
        self.num_pairs = num_pairs
        self.num_rows = num_rows
        self.splits = splits
        self.blocks = blocks
        self.tiles = tiles
        self.GROUPS = gl.constexpr(GROUPS)
        self.PART_0 = gl.constexpr(PART_0)
        self.PART_1 = gl.constexpr(PART_1)
        self.STAGES = gl.constexpr(STAGES)
        self.GATE = gl.constexpr(GATE)


@gluon.jit
def _fetch_steps(p, weight_U28I, part_0_TI, part_1_TI, EARLY: gl.constexpr):
    """All that the groups of this program multiply, in their order."""
    BYTES: gl.constexpr = (p.GROUPS * PIECE + p.PART_0 + p.PART_1) * BLOCK_I * 2
    wait_for_inputs(EARLY)
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), p.tiles, gl.num_programs(0)):
        split = tile % p.splits
        unit = tile // p.splits * (p.GROUPS * PIECE // 16)
        for block in range(split * p.blocks // p.splits, (split + 1) * p.blocks // p.splits):
            mbarrier.wait(p.free.index(stage), phase)
            is_there = p.ready.index(stage)
            mbarrier.expect(is_there, BYTES)
            i = block * BLOCK_I
            for group in gl.static_range(p.GROUPS):
                to = p.weight.index(p.GROUPS * stage + group)
                fetch(weight_U28I, [unit + PIECE // 16 * group, 0, 0, i], is_there, to)
            fetch(part_0_TI, [0, i], is_there, p.rows_0.index(stage))
            if p.PART_1 > 0:
                fetch(part_1_TI, [p.PART_0, i], is_there, p.rows_1.index(stage))
            stage, phase = next_stage(stage, phase, p.STAGES)


@gluon.jit
def _free_before(p, stage, pred):
    """Let the tiles of the stage before be overwritten, once every warp of the group has done with them."""
    barrier()
    mbarrier.arrive(p.free.index(gl.where(stage == 0, p.STAGES - 1, stage - 1)), pred=pred)


@gluon.jit
def _sums(p, stage, phase, blocks, GROUP: gl.constexpr):
    """Sums [64, part] in an accumulator for each part, and the stage behind them with its phase."""
    acc_0 = gl.zeros([PIECE, p.PART_0], gl.float32, sums_layout(p.PART_0))
    if p.PART_1 > 0:  # noqa: SIM108 - chosen at compile time
        acc_1 = gl.zeros([PIECE, p.PART_1], gl.float32, sums_layout(p.PART_1))
    else:
        acc_1 = acc_0
    for block in range(blocks):
        mbarrier.wait(p.ready.index(stage), phase)
        weight = p.weight.index(p.GROUPS * stage + GROUP).reshape((PIECE, BLOCK_I))
        acc_0 = warpgroup_mma(weight, p.rows_0.index(stage).permute((1, 0)), acc_0, use_acc=block > 0, is_async=True)
        if p.PART_1 > 0:
            rows_1 = p.rows_1.index(stage).permute((1, 0))
            acc_1 = warpgroup_mma(weight, rows_1, acc_1, use_acc=block > 0, is_async=True)
            acc_0, acc_1 = warpgroup_mma_wait(2, deps=(acc_0, acc_1))
        else:
            acc_0 = warpgroup_mma_wait(1, deps=(acc_0,))
        _free_before(p, stage, block > 0)
        stage, phase = next_stage(stage, phase, p.STAGES)
    if p.PART_1 > 0:
        acc_0, acc_1 = warpgroup_mma_wait(0, deps=(acc_0, acc_1))
    else:
        acc_0 = warpgroup_mma_wait(0, deps=(acc_0,))
        acc_1 = acc_0
    _free_before(p, stage, True)
    return acc_0, acc_1, stage, phase


@gluon.jit
def _multiply(p, pairs_STP, GROUP: gl.constexpr):
    """The results of one group, tile after tile."""
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), p.tiles, gl.num_programs(0)):
        split = tile % p.splits
        first = split * p.blocks // p.splits
        blocks = (split + 1) * p.blocks // p.splits - first
        acc_0, acc_1, stage, phase = _sums(p, stage, phase, blocks, GROUP)
        pair = (tile // p.splits * p.GROUPS + GROUP) * (PIECE // 2)
        pairs_TP = pairs_STP + split.to(gl.int64) * p.num_pairs * p.num_rows
        _store(p, pairs_TP, acc_0, pair, 0, p.PART_0)
        if p.PART_1 > 0:
            _store(p, pairs_TP, acc_1, pair, p.PART_0, p.PART_1)


@gluon.jit
def _paired(first, second, dtype: gl.constexpr, GATE: gl.constexpr):
    """What is stored of two sums of a thread: a gated number, or both side by side in one."""
    if GATE > 0:
        both = gated_sums(first, second, dtype, GATE == 1).to(dtype)
    elif dtype == gl.int32:
        both = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        both = gl.inline_asm_elementwise(
            "mov.b64 $0, {$1, $2};", "=l,f,f", [first, second], dtype=gl.int64, is_pure=True, pack=1
        )
    return both


@gluon.jit
def _store(p, pairs_TP, acc, pair, t, PART: gl.constexpr):
    """Stores a piece's sums, some columns at a time."""
    if PART > STORED:
        left, right = halves(acc, PART)
        _store(p, pairs_TP, left, pair, t, PART // 2)
        _store(p, pairs_TP, right, pair, t + PART // 2, PART // 2)
    else:
        first, second = acc.reshape([PIECE // 16, 2, 8, PART]).permute(0, 2, 3, 1).split()
        both_PT = _paired(first, second, pairs_TP.dtype.element_ty, p.GATE).reshape([PIECE // 2, PART])
        LAYOUT: gl.constexpr = both_PT.type.layout
        p_P = pair + gl.arange(0, PIECE // 2, gl.SliceLayout(1, LAYOUT))
        t_T = t + gl.arange(0, PART, gl.SliceLayout(0, LAYOUT))
        at = t_T[None, :] * p.num_pairs + p_P[:, None]
        gl.store(pairs_TP + at, both_PT, mask=(t_T < p.num_rows)[None, :] & (p_P < p.num_pairs)[:, None])


@gluon.jit(do_not_specialize=["num_pairs", "num_rows", "splits", "blocks", "tiles"])
def verify_rows_kernel(
    weight_U28I,
    part_0_TI,
    part_1_TI,
    pairs_STP,
    num_pairs,
    num_rows,
    splits,
    blocks,
    tiles,
    GROUPS: gl.constexpr,
    PART_0: gl.constexpr,
    PART_1: gl.constexpr,
    STAGES: gl.constexpr,
    GATE: gl.constexpr,
    EARLY: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Summands of a product, or its gated result; `gemray_kernels.triton.verify_rows` says of what."""
    weight = gl.allocate_shared_memory(
        weight_U28I.dtype, [GROUPS * STAGES, PIECE // 16, 2, 8, BLOCK_I], weight_U28I.layout
    )
    rows_0 = gl.allocate_shared_memory(weight_U28I.dtype, [STAGES, PART_0, BLOCK_I], part_0_TI.layout)
    if PART_1 > 0:
        rows_1 = gl.allocate_shared_memory(weight_U28I.dtype, [STAGES, PART_1, BLOCK_I], part_1_TI.layout)
    else:
        rows_1 = rows_0
    ready, free = ring_barriers(GROUPS, STAGES)
    fence_async_shared()
    barrier()
    p = VerifyProduct(
        weight, rows_0, rows_1, ready, free, num_pairs, num_rows, splits, blocks, tiles,
        GROUPS, PART_0, PART_1, STAGES, GATE,
    )  # fmt: skip
    R: gl.constexpr = MULTIPLY_REGISTERS
    F: gl.constexpr = FETCH_REGISTERS
    if GROUPS == 1:
        gl.warp_specialize(
            [(_multiply, (p, pairs_STP, 0)), (_fetch_steps, (p, weight_U28I, part_0_TI, part_1_TI, EARLY))],
            [1],
            [F],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (p, pairs_STP, 0)),
                (_multiply, (p, pairs_STP, 1)),
                (_fetch_steps, (p, weight_U28I, part_0_TI, part_1_TI, EARLY)),
            ],
            [4, 1],
            [R, F],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (p, pairs_STP, 0)),
                (_multiply, (p, pairs_STP, 1)),
                (_multiply, (p, pairs_STP, 2)),
                (_fetch_steps, (p, weight_U28I, part_0_TI, part_1_TI, EARLY)),
            ],
            [4, 4, 1],
            [R, R, F],
        )
