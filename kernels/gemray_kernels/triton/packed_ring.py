"""What kernels share that ask for packed weights before the rows are there: a ring of codes, scales and rows, which one
warp fills while others multiply (`packed_ahead`, `packed_columns`).

Shape legend: T rows, I inputs, O outputs, B units, C words of a unit, R rows of W words of several outputs, X scales of
a unit as int32.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.packed_weight import Scaling
from gemray_kernels.triton.ahead_tile import AheadTile
from gemray_kernels.triton.early_start import wait_having_let
from gemray_kernels.triton.gluon_ring import fetch, next_stage, swizzled

UNIT_INPUTS = 128
UNIT_I = gl.constexpr(UNIT_INPUTS)
WIDE_WORDS = gl.constexpr(64)
"""Words of 128 bytes, as the accelerator takes them: of one output or of two."""


def require_units(weight: TiledWeight, tile: AheadTile) -> None:
    """Refuse parts without inputs: their programs would store zeros before they have waited."""
    units = len(weight.words_BOC)
    if tile.splits > units:
        raise ValueError(f"{tile} of a weight of {units} units: at most as many parts are allowed")


def weight_descriptors(
    weight: TiledWeight, first: int, outputs: int
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """How the accelerator finds a program's codes, and its scales where those are of codes, from output `first` on."""
    words = weight.unit.words
    words_BRW = weight.words_BOC.view(len(weight.words_BOC), -1, WIDE_WORDS.value)[
        :, first * words // WIDE_WORDS.value :
    ]
    block = [1, outputs * words // WIDE_WORDS.value, WIDE_WORDS.value]
    scales = None
    if weight.scaling == Scaling.CODES:
        scale_BX = weight.scale_BO.view(torch.int32)[:, 2 * first :]
        scales = TensorDescriptor.from_tensor(scale_BX, [1, 2 * outputs], swizzled(0, 32, rank=2))
    return TensorDescriptor.from_tensor(words_BRW, block, swizzled(128, rank=3)), scales


@gluon.jit  # type: ignore[untyped-decorator]
def weight_tiles(words_BRW, scale_BX, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Shared memory for codes and scales of all steps of a ring."""
    OUTPUTS: gl.constexpr = SHAPE.outputs
    NUM: gl.constexpr = SHAPE.stages * SHAPE.tiles
    words_tiles = gl.allocate_shared_memory(
        gl.int16, [NUM, 1, OUTPUTS * SHAPE.words // WIDE_WORDS, WIDE_WORDS], words_BRW.layout
    )
    scale_tiles = words_tiles  # a name, where there are none
    if SHAPE.scaling:
        scale_tiles = gl.allocate_shared_memory(gl.int32, [NUM, 1, 2 * OUTPUTS], scale_BX.layout)
    return words_tiles, scale_tiles


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_weight(words_BRW, scale_BX, place, is_there, tiles, ROWS_SIZE: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for codes and scales of a step, whose barrier expects its rows, too."""
    TILES: gl.constexpr = SHAPE.tiles
    SIZE: gl.constexpr = TILES * words_BRW.block_type.nbytes + ROWS_SIZE
    words_tiles, scale_tiles = tiles
    unit, o, num_out, stage = place
    if SHAPE.scaling:
        mbarrier.expect(is_there, SIZE + TILES * scale_BX.block_type.nbytes)
    else:
        mbarrier.expect(is_there, SIZE)
    for half in gl.static_range(TILES):
        first = o + half * num_out
        fetch(
            words_BRW, [unit, first * SHAPE.words // WIDE_WORDS, 0], is_there, words_tiles.index(stage * TILES + half)
        )
        if SHAPE.scaling:
            fetch(scale_BX, [unit, 2 * first], is_there, scale_tiles.index(stage * TILES + half))


@gluon.jit
def _fetch_rows(x_TI, unit, is_there, x_tiles, stage):  # type: ignore[no-untyped-def]
    PARTS: gl.constexpr = UNIT_I // x_TI.block_type.shape[1]
    for part in gl.static_range(PARTS):
        place = unit * UNIT_I + part * x_TI.block_type.shape[1]
        fetch(x_TI, [0, place], is_there, x_tiles.index(PARTS * stage + part))


@gluon.jit  # type: ignore[untyped-decorator]
def fetch_steps(  # type: ignore[no-untyped-def]
    x_TI, words_BRW, scale_BX, tiles, x_tiles, barriers, sizes, SHAPE: gl.constexpr, EARLY: gl.constexpr
):
    """A ring of weights, then, once they are written, the rows to it, and then what follows as places become free.

    A step's rows are one tile of `x_tiles` or more, each with a part of a unit's inputs.
    """
    ROWS_SIZE: gl.constexpr = UNIT_I // x_TI.block_type.shape[1] * x_TI.block_type.nbytes
    ready, free = barriers
    first, end, o, num_out = sizes
    filled = gl.minimum(first + SHAPE.stages, end)
    for unit in range(first, filled):
        stage = unit - first
        _fetch_weight(words_BRW, scale_BX, (unit, o, num_out, stage), ready.index(stage), tiles, ROWS_SIZE, SHAPE)
    wait_having_let(EARLY)
    for unit in range(first, filled):
        _fetch_rows(x_TI, unit, ready.index(unit - first), x_tiles, unit - first)
    stage = 0
    phase = 0
    for unit in range(filled, end):
        mbarrier.wait(free.index(stage), phase)
        _fetch_weight(words_BRW, scale_BX, (unit, o, num_out, stage), ready.index(stage), tiles, ROWS_SIZE, SHAPE)
        _fetch_rows(x_TI, unit, ready.index(stage), x_tiles, stage)
        stage, phase = next_stage(stage, phase, SHAPE.stages)
