"""Plain products whose weights are asked for before the rows are there: which they are, and what they become."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.triton import linear_ahead, linear_choice
from gemray_kernels.triton.ahead_tile import AheadTile
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.linear_ahead import AHEAD_ROWS, gated_linear_ahead, rows_of_tile
from gemray_kernels.triton.linear_choice import STARTS
from gemray_kernels.triton.linear_tiles import (
    MULTIPROCESSORS,
    ahead_tile,
    gated_ahead_tile,
    tile_of_summands,
    whole_ahead_tile,
)
from support.kernels.triton_compile import Compiled, compile_launches, launches_of, loop_of

MULTIPROCESSOR_BYTES = 228 * 1024
RESERVED_BYTES = 1024
"""Shared memory of a multiprocessor that each program takes beside its own."""
REGISTERS = 65536
THREADS = 256
WAIT, LET = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
AHEAD, OTHER = "_linear_ahead_kernel", "_linear_kernel"
TILE = AheadTile(outputs=64, num_stages=4, splits=2, most_registers=96)
SUMMANDS = (
    *((16384, 5376), (18432, 5376), (5376, 8192), (5376, 16384), (5376, 21504)),
    *((8192, 2816), (9216, 2816), (2816, 4096), (2816, 8192), (2816, 2112), (128, 2816)),
    *((3072, 2560), (2048, 2560), (6144, 2560), (2560, 2048), (2560, 4096), (2560, 10240), (256, 2560)),
    *((2560, 1536), (5120, 1536), (1536, 2048), (1536, 6144), (1536, 12288), (1024, 10752), (1024, 8192)),
)
GATED = ((43008, 5376), (21504, 5376), (4224, 2816), (20480, 2560), (12288, 1536), (24576, 1536), (16384, 1024))


def row(count: int, width: int, *, aligned: bool = True) -> Tensor:
    """Rows that the memory accelerator cannot address, if they are not aligned."""
    return torch.empty(count, width + 8, dtype=torch.bfloat16)[:, 0 if aligned else 1 :][:, :width]


def weight(num_out: int, num_in: int) -> Tensor:
    return torch.empty(num_out, num_in, dtype=torch.bfloat16)


def compiled(tile: AheadTile, rows: int, gate: Gate) -> Compiled:
    with mock.patch.object(linear_ahead, "starts_early", return_value=True):
        (kernel,) = compile_launches(
            lambda: (
                linear_ahead.linear_ahead(row(rows, 1024), weight(2048, 1024), tile, out_dtype=torch.float32)
                if gate is Gate.NONE
                else gated_linear_ahead(row(rows, 1024), weight(2048, 1024), replace(tile, splits=1), gate)
            )
        )
    return kernel


@pytest.mark.parametrize(
    ("gate", "outputs", "rows"),
    [(Gate.NONE, 64, 3), (Gate.GELU, 32, 3), (Gate.SILU, 64, 3), (Gate.NONE, 128, 80), (Gate.GELU, 32, 40)],
)
def test_weights_are_asked_for_before_rows_are_waited_for(gate: Gate, outputs: int, rows: int) -> None:
    kernel = compiled(replace(TILE, outputs=outputs), rows, gate)
    assert not kernel.stack_bytes, "registers spill"
    assert not kernel.lost_products
    weights = 2 if gate is Gate.NONE else 4
    before, after = kernel.ptx.split(WAIT, 1)
    parts = sum(part > 0 for part in rows_of_tile(rows))
    # Behind the wait: the first rows' two halves, and in the loop of later steps all of a step.
    assert [part.count("cp.async.bulk.tensor") for part in (before, after)] == [weights, 4 * parts + weights]
    assert (LET in before, LET in after) == ((True, False) if gate is Gate.NONE else (False, True)), "who anchors"
    loop = loop_of(kernel.ptx)
    weight_rows = outputs if gate is Gate.NONE else 2 * outputs
    assert loop.count("wgmma.mma_async") == 8 * parts * (weight_rows // 64)
    assert "st.shared" not in loop


@pytest.mark.parametrize(
    ("num_out", "num_in", "rows", "chosen"),
    [
        (5376, 21504, 1, AheadTile(64, 6, 3, 96)),  # 252 programs, two a multiprocessor
        (5376, 21504, 32, AheadTile(64, 4, 3, 96)),
        (5376, 21504, 40, AheadTile(64, 4, 3, 96)),
        (5376, 21504, 64, AheadTile(64, 3, 3, 96)),
        (5376, 21504, 80, AheadTile(128, 4, 3, 96)),  # 126 programs, one
        (5376, 21504, 97, None),
        (18432, 5376, 65, None),  # 144 programs
        (2560, 10240, 64, AheadTile(64, 6, 3, 96)),
        (2560, 10240, 65, None),  # whose layers are faster with the library's
        (18432, 5376, 8, AheadTile(64, 4, 1, most_registers=72)),  # 288 programs, three
        (2560, 10240, 1, AheadTile(64, 8, 3, 96)),  # 120 programs, one
        (256, 2560, 1, AheadTile(64, 5, 4, 96)),  # parts of five steps
        (128, 2816, 1, AheadTile(64, 2, 11, 96)),
        (262144, 5376, 1, None),  # the vocabulary's, which is as fast
    ],
)
def test_summands_ahead(num_out: int, num_in: int, rows: int, chosen: AheadTile | None) -> None:
    """As was measured to be faster."""
    assert ahead_tile(rows, num_out, num_in) == chosen


@pytest.mark.parametrize(
    ("num_out", "num_in", "rows", "chosen"),
    [
        (43008, 5376, 1, AheadTile(32, 8, most_registers=96)),  # 672 programs, which cannot be there at once
        (20480, 2560, 16, AheadTile(32, 3, most_registers=72)),  # 320
        (20480, 2560, 17, AheadTile(64, 2, most_registers=96)),
        (12288, 1536, 1, AheadTile(32, 6, most_registers=96)),  # 192
        (4224, 2816, 32, AheadTile(32, 8, most_registers=96)),
        (4224, 2816, 40, AheadTile(32, 8, most_registers=96)),
        (43008, 5376, 96, AheadTile(64, 3, most_registers=96)),
        (43008, 5376, 97, None),
        (20480, 2560, 64, AheadTile(64, 2, most_registers=96)),
        (20480, 2560, 65, None),
    ],
)
def test_gated_ahead(num_out: int, num_in: int, rows: int, chosen: AheadTile | None) -> None:
    assert gated_ahead_tile(rows, num_out, num_in) == chosen


@pytest.mark.parametrize("shape", SUMMANDS)
def test_parts_are_those_of_other_rows(shape: tuple[int, int]) -> None:
    """So that a row has the same bits."""
    for rows in (1, 8, 16, 32, 40, 64, 80):
        tile = ahead_tile(rows, *shape)
        assert tile is not None or rows > 64
        assert tile is None or tile.splits == tile_of_summands(1, *shape).splits


@pytest.mark.parametrize("rows", [8, 16, 32, 40, 64, 80, 96])
def test_programs_that_are_to_be_there_at_once_have_room(rows: int) -> None:
    """Rings and registers of as many as there are for each multiprocessor."""
    found: dict[tuple[AheadTile, Gate], int] = {}
    for shape in SUMMANDS:
        for tile in (ahead_tile(rows, *shape), whole_ahead_tile(rows, *shape)):
            if tile is not None:
                programs = -(-shape[0] // tile.outputs) * tile.splits
                found[replace(tile, splits=1), Gate.NONE] = -(-programs // MULTIPROCESSORS)
    for shape in GATED:
        gated = gated_ahead_tile(rows, *shape)
        if gated is None:
            assert rows > 64
            continue
        beside = -(-(shape[0] // 2) // (gated.outputs * MULTIPROCESSORS))
        found[gated, Gate.GELU] = beside if beside <= 3 and rows <= 64 else 1
    assert len(found) >= (4 if rows <= 64 else 2)
    for (tile, gate), beside in found.items():
        kernel = compiled(tile, rows, gate)
        assert beside * (kernel.shared_bytes + RESERVED_BYTES) <= MULTIPROCESSOR_BYTES, (tile, gate, beside)
        assert beside * THREADS * tile.most_registers <= REGISTERS, (tile, gate, beside)
        assert not kernel.stack_bytes, tile


def test_rehearsed_rows_have_every_tile() -> None:
    """A start rehearses powers of two (`rank/eager_shapes`), and some numbers beside (`rank/compile_ahead`)."""

    def tiles(rows: int) -> list[object]:
        found = [gated_ahead_tile(rows, *shape) for shape in GATED]
        found += [choose(rows, *shape) for shape in SUMMANDS for choose in (ahead_tile, whole_ahead_tile)]
        return [*found, rows_of_tile(rows) if any(found) else None]

    rehearsed = [tiles(rows) for rows in (1, 2, 4, 8, 16, 32, 64, 128, *AHEAD_ROWS)]
    assert all(tiles(rows) in rehearsed for rows in range(1, 129))
    assert not any(tiles(128))


@pytest.mark.parametrize(
    ("rows", "on_hopper", "aligned", "served"),
    [
        (1, True, True, AHEAD),
        (64, True, True, AHEAD),
        (80, True, True, AHEAD),
        (1, False, True, OTHER),
        (1, True, False, OTHER),
    ],
)
def test_which_kernel_serves(rows: int, on_hopper: bool, aligned: bool, served: str) -> None:
    o, gate_up, down = weight(5376, 8192), weight(43008, 5376), weight(5376, 10752)

    def products() -> None:
        linear_choice.summands(row(rows, 8192, aligned=aligned), o)
        linear_choice.wide_summands(row(rows, 8192, aligned=aligned), o)
        linear_choice.linear(row(rows, 10752, aligned=aligned), down)
        linear_choice.gelu_linear(row(rows, 5376, aligned=aligned), gate_up)
        linear_choice.silu_linear(row(rows, 5376, aligned=aligned), gate_up)

    expected = [served] * 5
    if rows > 64:
        expected = [served] * 3  # the library's are others
    elif rows > 16:
        expected[2] = OTHER  # a rank's whole sums
    with mock.patch.object(linear_choice, "on_hopper", return_value=on_hopper):
        assert launches_of(products) == expected


def test_only_summands_let_the_next_kernel_start_at_once() -> None:
    x_TI, o = row(1, 8192), weight(5376, 8192)
    calls = (linear_choice.summands, linear_choice.wide_summands, linear_choice.linear)
    with (
        mock.patch.object(linear_choice, "on_hopper", return_value=True),
        mock.patch.object(linear_ahead, "starts_early", return_value=True),
    ):
        found = [compile_launches(partial(call, x_TI, o))[0].ptx for call in calls]
    assert [ptx.index(LET) < ptx.index(WAIT) for ptx in found] == [True, False, False]


@pytest.mark.parametrize("on_hopper", [True, False])
def test_kernels_before_are_told(on_hopper: bool) -> None:
    o, gate_up = weight(2560, 2048), weight(20480, 2560)
    rows = (0, 1, 16, 17, 64, 65)
    with mock.patch.object(linear_choice, "on_hopper", return_value=on_hopper):
        ahead = [STARTS.comes_ahead(o, count) for count in rows]
        at_once = [STARTS.at_once(o, count) for count in rows]
        gate_at_once = [STARTS.gate_at_once(gate_up, count) for count in rows]
    assert ahead == [on_hopper and 1 <= count <= 64 for count in rows]
    assert at_once == gate_at_once == [on_hopper and 1 <= count <= 16 for count in rows]


def test_products_of_other_dtypes_do_not_come_ahead() -> None:
    wide = weight(20480, 2560).float()
    with mock.patch.object(linear_choice, "on_hopper", return_value=True):
        assert not any(starts(wide, 1) for starts in (STARTS.comes_ahead, STARTS.at_once, STARTS.gate_at_once))


@pytest.mark.parametrize(
    ("x_TI", "weight_OI", "match"),
    [
        (row(97, 1024), weight(2048, 1024), "x \\[97, 1024\\].*1 to 96 bfloat16 rows"),
        (row(1, 1024, aligned=False), weight(2048, 1024), "multiples of 16 bytes"),
        (row(1, 1020), weight(2048, 1020), "multiples of 16 bytes"),
        (row(1, 512), weight(2048, 1024), "as many inputs"),
        (row(1, 1024).float(), weight(2048, 1024), "torch.float32"),
        (row(1, 1024), weight(2048, 2048)[:, ::2], "one beside the other"),
    ],
)
def test_what_the_kernel_is_not_for_is_refused(x_TI: Tensor, weight_OI: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        linear_ahead.linear_ahead(x_TI, weight_OI, TILE, out_dtype=torch.float32)


def test_parts_without_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"splits=9.* of 1024 inputs: at most 8 parts, of 128 each, are allowed"):
        linear_ahead.linear_ahead(row(1, 1024), weight(2048, 1024), replace(TILE, splits=9), out_dtype=torch.float32)


def test_a_gated_product_is_one_part() -> None:
    with pytest.raises(ValueError, match="one part is allowed"):
        gated_linear_ahead(row(1, 1024), weight(2048, 1024), TILE, Gate.GELU)
