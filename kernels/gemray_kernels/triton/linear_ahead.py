"""Linear layers of up to 96 rows, for sm_90, whose weights are asked for before the rows are there.

As `packed_ahead` for plain weights: a program starts while the kernel before still runs, and fills its ring of shared
memory with the weight, which that kernel does not write; only then does it wait for rows. So memory is read while norms
or the last of attention run. One warp asks for weights and rows by the memory accelerator, and four multiply them from
shared memory. Cuts and the order of sums are those of `linear`: a row has the same bits.

Shape legend: T rows, H inputs of a gated product, I inputs, O outputs, S splits of the inputs, W weight rows of a tile:
its outputs, or gate rows above up rows.
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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gemray_kernels.triton.ahead_tile import FETCH_REGISTERS, NUM_WARPS, AheadTile, part_of_program, require_one_part
from gemray_kernels.triton.early_start import let_next_start, starts_early, wait_for_inputs, wait_having_let
from gemray_kernels.triton.gluon_ring import (
    barrier,
    fetch,
    gated_halves,
    next_stage,
    ring_barriers,
    store_sums,
    swizzled,
)
from gemray_kernels.triton.linear import Gate

STEP_INPUTS = 128
"""Inputs are cut at multiples of so many, as those of `linear`."""
BOX_INPUTS = 64
BOX_I = gl.constexpr(BOX_INPUTS)
"""Inputs that are asked for at a time: 128 bytes, as the accelerator swizzles them and wgmma reads them."""
BOXES = gl.constexpr(STEP_INPUTS // BOX_INPUTS)
ROW_TILES = ((8, 0), (16, 0), (32, 0), (32, 8), (32, 16), (64, 0), (64, 16), (64, 32))
"""Rows of tiles, and of those behind them. The accelerator takes longer for rows that are not there: 33 rows in a tile
of 64 take a quarter more (`benchmarks/results/2026-12-01-h200-verify-ahead`)."""
MOST_AHEAD_ROWS = sum(ROW_TILES[-1])
AHEAD_ROWS = tuple(rows + more for rows, more in ROW_TILES if more)
"""Most rows of those tiles that powers of two are not."""
NO_ROWS = gl.constexpr(8)
"""Rows that stand for those behind, where there are none."""


@dataclass(frozen=True)
class _Shape:
    """What the compiler knows of a product."""

    outputs: int
    stages: int
    rows: int
    more: int
    gate: int
    anchors: bool

    @property
    def weights(self) -> int:
        """Weight rows of a tile."""
        return self.outputs * (2 if self.gate else 1)


def rows_of_tile(num_rows: int) -> tuple[int, int]:
    """Rows of a tile and those behind them, of which some may be zeros."""
    return next(tile for tile in ROW_TILES if num_rows <= sum(tile))


def step_bytes(tile_outputs: int, num_rows: int, gate: Gate) -> int:
    """Shared memory of a step: of the weight and of the rows."""
    return (tile_outputs * (1 if gate is Gate.NONE else 2) + sum(rows_of_tile(num_rows))) * STEP_INPUTS * 2


def fits(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Whether the memory accelerator can address rows and weight: all at multiples of 16 bytes."""
    places = (x_TI.data_ptr(), weight_OI.data_ptr(), 2 * x_TI.stride(0), 2 * x_TI.shape[1])
    return x_TI.stride(1) == 1 and weight_OI.is_contiguous() and all(place % 16 == 0 for place in places)


def linear_ahead(
    x_TI: Tensor, weight_OI: Tensor, tile: AheadTile, *, out_dtype: torch.dtype, anchors: bool = False
) -> Tensor:
    """Summands [S, T, O] of ``x · weightᵀ``: the product is their `total`.

    Args:
        x_TI: at most 96 bfloat16 rows, at least one, as `fits` says.
        weight_OI: likewise, of the same dtype.
        tile: of this product.
        out_dtype: of the summands; float32 unless there is only one.
        anchors: let the next kernel start only once this one has waited (`early_start`), and not at once.

    Raises:
        ValueError: rows or a weight that the kernel is not for.
    """
    out_STO = torch.empty(tile.splits, len(x_TI), len(weight_OI), dtype=out_dtype, device=x_TI.device)
    _launch(x_TI, weight_OI, out_STO, tile, Gate.NONE, anchors=anchors)
    return out_STO


def gated_linear_ahead(x_TH: Tensor, weight_2IH: Tensor, tile: AheadTile, gate: Gate) -> Tensor:
    """``act(x · gateᵀ) · (x · upᵀ)`` [T, I] of ``weight = [gate; up]``, rounded as separate kernels round. It anchors.

    Args:
        x_TH: as for `linear_ahead`.
        weight_2IH: likewise.
        tile: of this product, which is one part.
        gate: GELU or SILU.

    Raises:
        ValueError: as there, and for another tile.
    """
    require_one_part(tile)
    out_STO = torch.empty(1, len(x_TH), len(weight_2IH) // 2, dtype=x_TH.dtype, device=x_TH.device)
    _launch(x_TH, weight_2IH, out_STO, tile, gate, anchors=True)
    return out_STO[0]


def _launch(x_TI: Tensor, weight_OI: Tensor, out_STO: Tensor, tile: AheadTile, gate: Gate, *, anchors: bool) -> None:
    num_rows, num_in = x_TI.shape
    num_out = out_STO.shape[2]
    allowed = 0 < num_rows <= MOST_AHEAD_ROWS and num_in == weight_OI.shape[1] and fits(x_TI, weight_OI)
    if not allowed or {x_TI.dtype, weight_OI.dtype} != {torch.bfloat16}:
        raise ValueError(
            f"x {list(x_TI.shape)} {x_TI.dtype} with strides {x_TI.stride()} and weight {list(weight_OI.shape)} "
            f"{weight_OI.dtype}: 1 to {MOST_AHEAD_ROWS} bfloat16 rows and a bfloat16 weight of as many inputs, one "
            "beside the other, are allowed, all at multiples of 16 bytes"
        )
    steps = triton.cdiv(num_in, STEP_INPUTS)
    if tile.splits > steps:
        # Programs without inputs would store zeros before they have waited.
        raise ValueError(f"{tile} of {num_in} inputs: at most {steps} parts, of {STEP_INPUTS} each, are allowed")
    rows, more = rows_of_tile(num_rows)
    shape = _Shape(tile.outputs, tile.num_stages, rows, more, gate.value, anchors)
    early = starts_early(x_TI)
    _linear_ahead_kernel[(triton.cdiv(num_out, tile.outputs), tile.splits)](
        TensorDescriptor.from_tensor(x_TI, [rows, BOX_INPUTS], swizzled(128, rank=2)),
        TensorDescriptor.from_tensor(x_TI, [more or rows, BOX_INPUTS], swizzled(128, rank=2)),
        TensorDescriptor.from_tensor(weight_OI, [tile.outputs, BOX_INPUTS], swizzled(128, rank=2)),
        out_STO,
        num_rows,
        num_out,
        steps,
        SHAPE=shape,
        EARLY=early,
        FETCH_REGISTERS=FETCH_REGISTERS,
        num_warps=NUM_WARPS,
        maxnreg=tile.most_registers,
        launch_pdl=early,
    )


@gluon.jit
def _fetch_weight(weight_OI, place, is_there, tiles, SHAPE: gl.constexpr):
    """Ask for the weight of a step, whose barrier expects its rows, too."""
    BYTES: gl.constexpr = (SHAPE.weights + SHAPE.rows + SHAPE.more) * BOX_I * 2 * BOXES
    step, o, num_out, stage = place
    mbarrier.expect(is_there, BYTES)
    for box in gl.static_range(BOXES):
        tile = tiles.index(stage * BOXES + box)
        i = (step * BOXES + box) * BOX_I
        if SHAPE.gate:
            fetch(weight_OI, [o, i], is_there, tile.slice(0, SHAPE.outputs))
            fetch(weight_OI, [num_out + o, i], is_there, tile.slice(SHAPE.outputs, SHAPE.outputs))
        else:
            fetch(weight_OI, [o, i], is_there, tile)


@gluon.jit
def _fetch_rows(rows, step, is_there, row_tiles, stage, SHAPE: gl.constexpr):
    x_TI, more_TI = rows
    x_tiles, more_tiles = row_tiles
    for box in gl.static_range(BOXES):
        i = (step * BOXES + box) * BOX_I
        fetch(x_TI, [0, i], is_there, x_tiles.index(stage * BOXES + box))
        if SHAPE.more:
            fetch(more_TI, [SHAPE.rows, i], is_there, more_tiles.index(stage * BOXES + box))


@gluon.jit
def _fetch_steps(rows, weight_OI, tiles, row_tiles, barriers, sizes, SHAPE: gl.constexpr, EARLY: gl.constexpr):
    """A ring of weights, then, once they are written, the rows to it, and then what follows as places become free."""
    ready, free = barriers
    first, end, o, num_out = sizes
    filled = gl.minimum(first + SHAPE.stages, end)
    for step in range(first, filled):
        stage = step - first
        _fetch_weight(weight_OI, (step, o, num_out, stage), ready.index(stage), tiles, SHAPE)
    if SHAPE.anchors:
        wait_for_inputs(EARLY)
    else:
        wait_having_let(EARLY)
    for step in range(first, filled):
        stage = step - first
        _fetch_rows(rows, step, ready.index(stage), row_tiles, stage, SHAPE)
    stage = 0
    phase = 0
    for step in range(filled, end):
        mbarrier.wait(free.index(stage), phase)
        _fetch_weight(weight_OI, (step, o, num_out, stage), ready.index(stage), tiles, SHAPE)
        _fetch_rows(rows, step, ready.index(stage), row_tiles, stage, SHAPE)
        stage, phase = next_stage(stage, phase, SHAPE.stages)


@gluon.jit
def _store(acc, out_STO, place, sizes, SHAPE: gl.constexpr):
    """Gate sums [W, T] if they are to be, and store them at their split, first row and output."""
    dtype: gl.constexpr = out_STO.dtype.element_ty
    if SHAPE.gate:
        acc = gated_halves(acc, dtype, SHAPE.gate == 1)
    store_sums(acc.to(dtype), None, (None, out_STO), place, sizes, False)


@gluon.jit
def _multiply(tiles, row_tiles, barriers, out_STO, num_rows, split, sizes, SHAPE: gl.constexpr):
    ROWS: gl.constexpr = SHAPE.rows
    MORE: gl.constexpr = SHAPE.more if SHAPE.more else NO_ROWS
    WEIGHTS: gl.constexpr = SHAPE.weights
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, ROWS, 16]
    )
    MORE_SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, MORE, 16]
    )
    x_tiles, more_tiles = row_tiles
    ready, free = barriers
    first, end, o, num_out = sizes
    acc = gl.zeros([WEIGHTS, ROWS], gl.float32, SUMS)
    more = gl.zeros([WEIGHTS, MORE], gl.float32, MORE_SUMS)
    stage = 0
    phase = 0
    for _step in range(first, end):
        mbarrier.wait(ready.index(stage), phase)
        for box in gl.static_range(BOXES):
            at = stage * BOXES + box
            acc = warpgroup_mma(tiles.index(at), x_tiles.index(at).permute((1, 0)), acc, is_async=True)
            if SHAPE.more:
                more = warpgroup_mma(tiles.index(at), more_tiles.index(at).permute((1, 0)), more, is_async=True)
        if SHAPE.more:
            acc, more = warpgroup_mma_wait(0, deps=(acc, more))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        # What all warps have multiplied may be overwritten.
        barrier()
        mbarrier.arrive(free.index(stage))
        stage, phase = next_stage(stage, phase, SHAPE.stages)

    _store(acc, out_STO, (split, 0, o), (num_rows, num_out), SHAPE)
    if SHAPE.more:
        _store(more, out_STO, (split, ROWS, o), (num_rows, num_out), SHAPE)


@gluon.jit(do_not_specialize=["num_rows", "steps"])
def _linear_ahead_kernel(
    x_TI,
    more_TI,
    weight_OI,
    out_STO,
    num_rows,
    num_out,
    steps,
    SHAPE: gl.constexpr,
    EARLY: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    TILES: gl.constexpr = SHAPE.stages * BOXES
    if not SHAPE.anchors:
        let_next_start(EARLY)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [TILES, SHAPE.weights, BOX_I], weight_OI.layout)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [TILES, SHAPE.rows, BOX_I], x_TI.layout)
    more_tiles = x_tiles  # a name, where there are no rows behind
    if SHAPE.more:
        more_tiles = gl.allocate_shared_memory(gl.bfloat16, [TILES, SHAPE.more, BOX_I], more_TI.layout)
    barriers = ring_barriers(1, SHAPE.stages)
    fence_async_shared()
    barrier()
    split, sizes = part_of_program(steps, num_out, SHAPE)
    row_tiles = (x_tiles, more_tiles)
    gl.warp_specialize(
        [
            (_multiply, (tiles, row_tiles, barriers, out_STO, num_rows, split, sizes, SHAPE)),
            (_fetch_steps, ((x_TI, more_TI), weight_OI, tiles, row_tiles, barriers, sizes, SHAPE, EARLY)),
        ],
        [1],
        [FETCH_REGISTERS],
    )
