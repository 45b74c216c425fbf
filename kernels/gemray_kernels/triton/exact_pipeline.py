"""Linear layers of many rows whose many leaves one program adds up (`gemray_kernels.numerics`), for sm_90.

One warp fetches tiles of both operands, always some ahead; two groups of four warps multiply them, 64 rows each. So the
border between two leaves, where sums are added up, stops neither the fetching nor the other group, which a loop that
Triton pipelines would do. Registers hold a leaf's sum and two that wait for their neighbours of the tree; of eight
leaves the sum of the first four waits in shared memory.

Shape legend: T rows, L leaves, I inputs (beside L: of a leaf), O outputs, S summands.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gemray_kernels.triton.gluon_ring import barrier, fetch, ring_barriers
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS

ROWS = 128
"""Rows of a tile."""
HALF = gl.constexpr(64)
"""Rows of a group of warps."""
BLOCK_I = gl.constexpr(64)
"""Inputs of a tile, 128 bytes, whose rows wgmma reads from shared memory as the accelerator swizzles them."""
GROUP = 8
"""Tiles of rows that run side by side over the same outputs, so that they find them in the cache."""
FETCH_REGISTERS = 24
MULTIPLY_REGISTERS = 240


@dataclass(frozen=True)
class PipelineTile:
    """What a program holds beside its 128 rows, and how many leaves it adds up: 1, 2, 4 or 8."""

    outputs: int
    num_stages: int
    leaves: int


def fits(x_TI: Tensor, weight_OI: Tensor, leaves: int) -> bool:
    """Whether the memory accelerator can address the leaves of both tensors, bfloat16 at multiples of 16 bytes."""
    aligned = all(m.stride(0) % 8 == 0 and m.data_ptr() % 16 == 0 for m in (x_TI, weight_OI))
    return x_TI.dtype == torch.bfloat16 and x_TI.shape[1] % (8 * leaves) == 0 and aligned


def pipelined_summands(
    x_TI: Tensor, weight_OI: Tensor, leaves: int, tile: PipelineTile, out_dtype: torch.dtype
) -> Tensor:
    """Summands [S, T, O] of ``x · weightᵀ``, aligned subtrees of ``tile.leaves`` leaves in order.

    Args:
        x_TI: at least one row, as `fits` says. The accelerator puts zeros behind a leaf's end.
        weight_OI: of the same dtype.
        leaves: into which the inputs are cut.
        tile: its leaves divide `leaves`.
        out_dtype: of the summands; float32 unless there is only one.
    """
    num_rows, num_in = x_TI.shape
    num_out = weight_OI.shape[0]
    splits = leaves // tile.leaves
    out_STO = torch.empty(splits, num_rows, num_out, dtype=out_dtype, device=x_TI.device)
    leaf = num_in // leaves
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    tiles = triton.cdiv(num_rows, ROWS) * triton.cdiv(num_out, tile.outputs) * splits
    _pipeline_kernel[(min(tiles, MULTIPROCESSORS),)](
        TensorDescriptor.from_tensor(x_TI.view(num_rows, leaves, leaf), [HALF.value, 1, BLOCK_I.value], swizzled),
        TensorDescriptor.from_tensor(weight_OI.view(num_out, leaves, leaf), [tile.outputs, 1, BLOCK_I.value], swizzled),
        out_STO,
        num_rows,
        num_out,
        splits,
        triton.cdiv(leaf, BLOCK_I.value),
        LEAVES=tile.leaves,
        BLOCK_O=tile.outputs,
        STAGES=tile.num_stages,
        GROUP=GROUP,
        FETCH_REGISTERS=FETCH_REGISTERS,
        MULTIPLY_REGISTERS=MULTIPLY_REGISTERS,
        num_warps=4,
    )
    return out_STO


@gluon.jit  # type: ignore[untyped-decorator]
def _place(tile, num_rows, num_out, BLOCK_O: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Split, first row and first output of a tile."""
    row_tiles = gl.cdiv(num_rows, 2 * HALF)
    out_tiles = gl.cdiv(num_out, BLOCK_O)
    split = tile // (row_tiles * out_tiles)
    tile = tile % (row_tiles * out_tiles)
    first = tile // (GROUP * out_tiles) * GROUP
    side_by_side = gl.minimum(row_tiles - first, GROUP)
    t = (first + tile % (GROUP * out_tiles) % side_by_side) * 2 * HALF
    return split, t, tile % (GROUP * out_tiles) // side_by_side * BLOCK_O


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_tiles(  # type: ignore[no-untyped-def]
    x_TLI,
    weight_OLI,
    x_tiles,
    weight_tiles,
    ready,
    free,
    num_rows,
    num_out,
    splits,
    leaf_blocks,
    LEAVES: gl.constexpr,
    BLOCK_O: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    tiles = gl.cdiv(num_rows, 2 * HALF) * gl.cdiv(num_out, BLOCK_O) * splits
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        split, t, o = _place(tile, num_rows, num_out, BLOCK_O, GROUP)
        for block in range(LEAVES * leaf_blocks):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
            is_there = ready.index(stage)
            mbarrier.expect(is_there, 2 * x_TLI.block_type.nbytes + weight_OLI.block_type.nbytes)
            leaf = split * LEAVES + block // leaf_blocks
            i = block % leaf_blocks * BLOCK_I
            fetch(x_TLI, [t, leaf, i], is_there, x_tiles.index(2 * stage))
            fetch(x_TLI, [t + HALF, leaf, i], is_there, x_tiles.index(2 * stage + 1))
            fetch(weight_OLI, [o, leaf, i], is_there, weight_tiles.index(stage))
            count += 1


@gluon.jit  # type: ignore[untyped-decorator]
def _leaf(  # type: ignore[no-untyped-def]
    x_tiles,
    weight_tiles,
    ready,
    free,
    first,
    leaf_blocks,
    GROUP_OF_WARPS: gl.constexpr,
    BLOCK_O: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """One leaf's sum in a single accumulator, over its inputs in order."""
    acc = gl.zeros([HALF, BLOCK_O], gl.float32, LAYOUT)
    for block in range(leaf_blocks):
        count = first + block
        stage = count % STAGES
        mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
        x = x_tiles.index(2 * stage + GROUP_OF_WARPS).reshape((HALF, BLOCK_I))
        weight = weight_tiles.index(stage).reshape((BLOCK_O, BLOCK_I)).permute((1, 0))
        acc = warpgroup_mma(x, weight, acc, use_acc=block > 0, is_async=True)
        # The product before this one has been computed by every warp of the group: its tiles may be overwritten.
        acc = warpgroup_mma_wait(1, deps=(acc,))
        barrier()
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=count > 0)
    return warpgroup_mma_wait(0, deps=(acc,))


@gluon.jit  # type: ignore[untyped-decorator]
def _subtree(  # type: ignore[no-untyped-def]
    x_tiles,
    weight_tiles,
    ready,
    free,
    waiting,
    first,
    leaf_blocks,
    LEAVES: gl.constexpr,
    GROUP_OF_WARPS: gl.constexpr,
    BLOCK_O: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Sum of LEAVES leaves by the tree."""
    if LEAVES == 1:
        acc = _leaf(
            x_tiles, weight_tiles, ready, free, first, leaf_blocks, GROUP_OF_WARPS, BLOCK_O, STAGES, LAYOUT
        )  # fmt: skip
    else:
        N: gl.constexpr = LEAVES // 2
        left = _subtree(
            x_tiles, weight_tiles, ready, free, waiting, first, leaf_blocks, N, GROUP_OF_WARPS, BLOCK_O, STAGES, LAYOUT
        )  # fmt: skip
        if LEAVES == 8:
            waiting.index(GROUP_OF_WARPS).store(left)
        first += N * leaf_blocks
        right = _subtree(
            x_tiles, weight_tiles, ready, free, waiting, first, leaf_blocks, N, GROUP_OF_WARPS, BLOCK_O, STAGES, LAYOUT
        )  # fmt: skip
        if LEAVES == 8:
            left = waiting.index(GROUP_OF_WARPS).load(LAYOUT)
        acc = left + right
    return acc


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x_tiles,
    weight_tiles,
    ready,
    free,
    waiting,
    out_STO,
    num_rows,
    num_out,
    splits,
    leaf_blocks,
    GROUP_OF_WARPS: gl.constexpr,
    LEAVES: gl.constexpr,
    BLOCK_O: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_O, 16]
    )
    tiles = gl.cdiv(num_rows, 2 * HALF) * gl.cdiv(num_out, BLOCK_O) * splits
    first = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        split, t, o = _place(tile, num_rows, num_out, BLOCK_O, GROUP)
        acc = _subtree(
            x_tiles,
            weight_tiles,
            ready,
            free,
            waiting,
            first,
            leaf_blocks,
            LEAVES,
            GROUP_OF_WARPS,
            BLOCK_O,
            STAGES,
            LAYOUT,
        )
        first += LEAVES * leaf_blocks
        t_T = t + GROUP_OF_WARPS * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
        o_O = o + gl.arange(0, BLOCK_O, gl.SliceLayout(0, LAYOUT))
        at = out_STO + split.to(gl.int64) * num_rows * num_out
        to = t_T.to(gl.int64)[:, None] * num_out + o_O[None, :]
        gl.store(at + to, acc.to(out_STO.dtype.element_ty), mask=(t_T < num_rows)[:, None] & (o_O < num_out)[None, :])


@gluon.jit(do_not_specialize=["num_rows", "splits"])  # type: ignore[untyped-decorator]
def _pipeline_kernel(  # type: ignore[no-untyped-def]
    x_TLI,
    weight_OLI,
    out_STO,
    num_rows,
    num_out,
    splits,
    leaf_blocks,
    LEAVES: gl.constexpr,
    BLOCK_O: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    x_tiles = gl.allocate_shared_memory(x_TLI.dtype, [2 * STAGES, HALF, 1, BLOCK_I], x_TLI.layout)
    weight_tiles = gl.allocate_shared_memory(weight_OLI.dtype, [STAGES, BLOCK_O, 1, BLOCK_I], weight_OLI.layout)
    ready, free = ring_barriers(2, STAGES)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if LEAVES == 8:
        waiting = gl.allocate_shared_memory(gl.float32, [2, HALF, BLOCK_O], plain)
    else:
        waiting = gl.allocate_shared_memory(gl.float32, [2, 8, 8], plain)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    x_tiles,
                    weight_tiles,
                    ready,
                    free,
                    waiting,
                    out_STO,
                    num_rows,
                    num_out,
                    splits,
                    leaf_blocks,
                    0,
                    LEAVES,
                    BLOCK_O,
                    STAGES,
                    GROUP,
                ),
            ),
            (
                _multiply,
                (
                    x_tiles,
                    weight_tiles,
                    ready,
                    free,
                    waiting,
                    out_STO,
                    num_rows,
                    num_out,
                    splits,
                    leaf_blocks,
                    1,
                    LEAVES,
                    BLOCK_O,
                    STAGES,
                    GROUP,
                ),
            ),
            (
                _fetch_tiles,
                (
                    x_TLI,
                    weight_OLI,
                    x_tiles,
                    weight_tiles,
                    ready,
                    free,
                    num_rows,
                    num_out,
                    splits,
                    leaf_blocks,
                    LEAVES,
                    BLOCK_O,
                    STAGES,
                    GROUP,
                ),
            ),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, FETCH_REGISTERS],
    )
