"""The kernel of `gemray_kernels.triton.exact_rows`: one warp fetches, groups of four warps multiply and store.

Shape legend: T rows, L leaves, I inputs (beside L: of a leaf), O outputs, S summands.
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

from gemray_kernels.triton.early_start import wait_for_inputs
from gemray_kernels.triton.gluon_ring import barrier, fetch, gated_halves, ring_barriers

PIECE = gl.constexpr(64)
"""Weight rows of a group of warps: what wgmma multiplies at once."""
BLOCK_I = gl.constexpr(64)
"""Inputs of a tile, 128 bytes, whose rows wgmma reads from shared memory as the accelerator swizzles them."""
STORED = gl.constexpr(64)
"""Columns that a group of warps stores at a time: places of more would push sums out of its registers."""
GATED = gl.constexpr(16)
"""Columns that it gates at a time: so much of shared memory is left."""


@aggregate
class Product:
    """What all warps of a program know."""

    weight: gl.shared_memory_descriptor
    rows_0: gl.shared_memory_descriptor
    rows_1: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    num_out: gl.tensor
    num_rows: gl.tensor
    splits: gl.tensor
    leaf_blocks: gl.tensor
    LEAVES: gl.constexpr
    GROUPS: gl.constexpr
    PART_0: gl.constexpr
    PART_1: gl.constexpr
    STAGES: gl.constexpr
    GATE: gl.constexpr
    OUTPUTS: gl.constexpr
    ROWS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, weight, rows_0, rows_1, ready, free, num_out, num_rows, splits, leaf_blocks,
        LEAVES, GROUPS, PART_0, PART_1, STAGES, GATE,
    ):  # fmt: skip
        self.weight = weight
        self.rows_0 = rows_0
        self.rows_1 = rows_1
        self.ready = ready
        self.free = free
        self.num_out = num_out
        self.num_rows = num_rows
        self.splits = splits
        self.leaf_blocks = leaf_blocks
        self.LEAVES = gl.constexpr(LEAVES)
        self.GROUPS = gl.constexpr(GROUPS)
        self.PART_0 = gl.constexpr(PART_0)
        self.PART_1 = gl.constexpr(PART_1)
        self.STAGES = gl.constexpr(STAGES)
        self.GATE = gl.constexpr(GATE)
        self.OUTPUTS = gl.constexpr(GROUPS * PIECE // 2 if GATE else GROUPS * PIECE)
        self.ROWS = gl.constexpr(PART_0 + PART_1)


@gluon.constexpr_function
def _layout(part: int) -> gl.NVMMADistributedLayout:
    """How registers of four warps hold a piece's sums with `part` columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, part, 16])


@gluon.jit
def _tiles(p):
    return gl.cdiv(p.num_out, p.OUTPUTS) * gl.cdiv(p.num_rows, p.ROWS) * p.splits


@gluon.jit
def _place(p, tile):
    """Split, first output and first row of a tile. Tiles of the same outputs run side by side."""
    out_tiles = gl.cdiv(p.num_out, p.OUTPUTS)
    row_tiles = gl.cdiv(p.num_rows, p.ROWS)
    split = tile // (out_tiles * row_tiles)
    tile = tile % (out_tiles * row_tiles)
    return split, tile // row_tiles * p.OUTPUTS, tile % row_tiles * p.ROWS


@gluon.jit
def _fetch_weight(p, weight_OLI, is_there, stage, o, leaf, i):
    for group in gl.static_range(p.GROUPS):
        to = p.weight.index(p.GROUPS * stage + group)
        if p.GATE > 0:  # half a piece of gate rows, and up rows as many
            at = o + group * (PIECE // 2)
            fetch(weight_OLI, [at, leaf, i], is_there, to.slice(0, PIECE // 2))
            fetch(weight_OLI, [p.num_out + at, leaf, i], is_there, to.slice(PIECE // 2, PIECE // 2))
        else:
            fetch(weight_OLI, [o + group * PIECE, leaf, i], is_there, to)


@gluon.jit
def _fetch_rows(p, part_0_TLI, part_1_TLI, is_there, stage, t, leaf, i):
    fetch(part_0_TLI, [t, leaf, i], is_there, p.rows_0.index(stage))
    if p.PART_1 > 0:
        fetch(part_1_TLI, [t + p.PART_0, leaf, i], is_there, p.rows_1.index(stage))


@gluon.jit
def _fetch_tiles(p, weight_OLI, part_0_TLI, part_1_TLI, EARLY: gl.constexpr):
    BYTES: gl.constexpr = (p.GROUPS * PIECE + p.ROWS) * BLOCK_I * 2
    wait_for_inputs(EARLY)
    count = 0
    for tile in range(gl.program_id(0), _tiles(p), gl.num_programs(0)):
        split, o, t = _place(p, tile)
        for block in range(p.LEAVES * p.leaf_blocks):
            stage = count % p.STAGES
            mbarrier.wait(p.free.index(stage), ((count // p.STAGES) & 1) ^ 1)
            is_there = p.ready.index(stage)
            mbarrier.expect(is_there, BYTES)
            leaf = split * p.LEAVES + block // p.leaf_blocks
            i = block % p.leaf_blocks * BLOCK_I
            _fetch_weight(p, weight_OLI, is_there, stage, o, leaf, i)
            _fetch_rows(p, part_0_TLI, part_1_TLI, is_there, stage, t, leaf, i)
            count += 1


@gluon.jit
def _leaf(p, first, GROUP: gl.constexpr):
    """One leaf's sums [64, part] in an accumulator for each part, over its inputs in order."""
    acc_0 = gl.zeros([PIECE, p.PART_0], gl.float32, _layout(p.PART_0))
    if p.PART_1 > 0:  # noqa: SIM108 - chosen at compile time
        acc_1 = gl.zeros([PIECE, p.PART_1], gl.float32, _layout(p.PART_1))
    else:
        acc_1 = acc_0
    for block in range(p.leaf_blocks):
        count = first + block
        stage = count % p.STAGES
        mbarrier.wait(p.ready.index(stage), (count // p.STAGES) & 1)
        weight = p.weight.index(p.GROUPS * stage + GROUP).reshape((PIECE, BLOCK_I))
        rows_0 = p.rows_0.index(stage).reshape((p.PART_0, BLOCK_I)).permute((1, 0))
        acc_0 = warpgroup_mma(weight, rows_0, acc_0, use_acc=block > 0, is_async=True)
        # The products before these have been computed by every warp of the group: their tiles may be overwritten.
        if p.PART_1 > 0:
            rows_1 = p.rows_1.index(stage).reshape((p.PART_1, BLOCK_I)).permute((1, 0))
            acc_1 = warpgroup_mma(weight, rows_1, acc_1, use_acc=block > 0, is_async=True)
            acc_0, acc_1 = warpgroup_mma_wait(2, deps=(acc_0, acc_1))
        else:
            acc_0 = warpgroup_mma_wait(1, deps=(acc_0,))
        barrier()
        mbarrier.arrive(p.free.index((count + p.STAGES - 1) % p.STAGES), pred=count > 0)
    if p.PART_1 > 0:
        acc_0, acc_1 = warpgroup_mma_wait(0, deps=(acc_0, acc_1))
    else:
        acc_0 = warpgroup_mma_wait(0, deps=(acc_0,))
        acc_1 = acc_0
    return acc_0, acc_1


@gluon.jit
def _subtree(p, first, LEAVES: gl.constexpr, GROUP: gl.constexpr):
    """Sums of LEAVES leaves by the tree."""
    if LEAVES == 1:
        acc_0, acc_1 = _leaf(p, first, GROUP)
    else:
        HALF: gl.constexpr = LEAVES // 2
        left_0, left_1 = _subtree(p, first, HALF, GROUP)
        acc_0, acc_1 = _subtree(p, first + HALF * p.leaf_blocks, HALF, GROUP)
        acc_0 = left_0 + acc_0
        acc_1 = left_1 + acc_1
    return acc_0, acc_1


@gluon.jit
def _multiply(p, out_STO, GROUP: gl.constexpr):
    first = 0
    for tile in range(gl.program_id(0), _tiles(p), gl.num_programs(0)):
        split, o, t = _place(p, tile)
        o += GROUP * (p.OUTPUTS // p.GROUPS)
        acc_0, acc_1 = _subtree(p, first, p.LEAVES, GROUP)
        first += p.LEAVES * p.leaf_blocks
        _store(p, out_STO, acc_0, acc_1, split, o, t)


@gluon.jit
def _store(p, out_STO, acc_0, acc_1, split, o, t):
    if p.GATE > 0:
        _store_gated(p, out_STO, acc_0, o, t, p.PART_0)
        if p.PART_1 > 0:
            _store_gated(p, out_STO, acc_1, o, t + p.PART_0, p.PART_1)
    else:
        out_TO = out_STO + split.to(gl.int64) * p.num_out * p.num_rows
        _store_part(p, out_TO, acc_0, o, t, p.PART_0)
        if p.PART_1 > 0:
            _store_part(p, out_TO, acc_1, o, t + p.PART_0, p.PART_1)


@gluon.jit
def _halves(acc, PART: gl.constexpr):
    """The left and the right half of a piece's columns, which lie in the same threads' registers."""
    NARROW: gl.constexpr = PART // 2
    left, right = acc.reshape([PIECE, 2, NARROW]).permute(0, 2, 1).split()
    left = gl.convert_layout(left, _layout(NARROW), assert_trivial=True)
    right = gl.convert_layout(right, _layout(NARROW), assert_trivial=True)
    return left, right


@gluon.jit
def _store_block(p, out_TO, block, o_O, t_T):
    to = t_T.to(gl.int64)[None, :] * p.num_out + o_O[:, None]
    mask = (o_O < p.num_out)[:, None] & (t_T < p.num_rows)[None, :]
    gl.store(out_TO + to, block.to(out_TO.dtype.element_ty), mask=mask)


@gluon.jit
def _store_part(p, out_TO, acc, o, t, PART: gl.constexpr):
    """Stores a piece's sums, some columns at a time."""
    if PART > STORED:
        left, right = _halves(acc, PART)
        _store_part(p, out_TO, left, o, t, PART // 2)
        _store_part(p, out_TO, right, o, t + PART // 2, PART // 2)
    else:
        o_O = o + gl.arange(0, PIECE, gl.SliceLayout(1, _layout(PART)))
        t_T = t + gl.arange(0, PART, gl.SliceLayout(0, _layout(PART)))
        _store_block(p, out_TO, acc, o_O, t_T)


@gluon.jit
def _store_gated(p, out_TO, acc, o, t, PART: gl.constexpr):
    """Stores ``act(gate) · up`` of a piece with gate rows above up rows, some columns at a time."""
    if PART > GATED:
        left, right = _halves(acc, PART)
        _store_gated(p, out_TO, left, o, t, PART // 2)
        _store_gated(p, out_TO, right, o, t + PART // 2, PART // 2)
    else:
        sums = gated_halves(acc, out_TO.dtype.element_ty, p.GATE == 1)
        PLAIN: gl.constexpr = sums.type.layout
        o_O = o + gl.arange(0, PIECE // 2, gl.SliceLayout(1, PLAIN))
        t_T = t + gl.arange(0, PART, gl.SliceLayout(0, PLAIN))
        _store_block(p, out_TO, sums, o_O, t_T)


@gluon.jit(do_not_specialize=["num_out", "num_rows", "splits", "leaf_blocks"])
def rows_kernel(
    weight_OLI,
    part_0_TLI,
    part_1_TLI,
    out_STO,
    num_out,
    num_rows,
    splits,
    leaf_blocks,
    LEAVES: gl.constexpr,
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
    """Summands of a product, or its gated result; `gemray_kernels.triton.exact_rows` says of what."""
    weight = gl.allocate_shared_memory(weight_OLI.dtype, [GROUPS * STAGES, PIECE, 1, BLOCK_I], weight_OLI.layout)
    rows_0 = gl.allocate_shared_memory(weight_OLI.dtype, [STAGES, PART_0, 1, BLOCK_I], part_0_TLI.layout)
    if PART_1 > 0:
        rows_1 = gl.allocate_shared_memory(weight_OLI.dtype, [STAGES, PART_1, 1, BLOCK_I], part_1_TLI.layout)
    else:
        rows_1 = rows_0
    ready, free = ring_barriers(GROUPS, STAGES)
    fence_async_shared()
    barrier()
    p = Product(
        weight, rows_0, rows_1, ready, free, num_out, num_rows, splits, leaf_blocks,
        LEAVES, GROUPS, PART_0, PART_1, STAGES, GATE,
    )  # fmt: skip
    R: gl.constexpr = MULTIPLY_REGISTERS
    F: gl.constexpr = FETCH_REGISTERS
    if GROUPS == 1:
        gl.warp_specialize(
            [(_multiply, (p, out_STO, 0)), (_fetch_tiles, (p, weight_OLI, part_0_TLI, part_1_TLI, EARLY))],
            [1],
            [F],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (p, out_STO, 0)),
                (_multiply, (p, out_STO, 1)),
                (_fetch_tiles, (p, weight_OLI, part_0_TLI, part_1_TLI, EARLY)),
            ],
            [4, 1],
            [R, F],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (p, out_STO, 0)),
                (_multiply, (p, out_STO, 1)),
                (_multiply, (p, out_STO, 2)),
                (_fetch_tiles, (p, weight_OLI, part_0_TLI, part_1_TLI, EARLY)),
            ],
            [4, 4, 1],
            [R, R, F],
        )
