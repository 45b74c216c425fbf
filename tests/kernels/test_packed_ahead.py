"""Products whose weights are asked for before the rows are there: which they are, and what they are compiled to."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.triton import packed_ahead
from gemray_kernels.triton.ahead_tile import AheadTile
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_ahead import packed_gated_linear_ahead, packed_linear_ahead
from gemray_kernels.triton.packed_products import TiledProduct
from gemray_kernels.triton.packed_tile_choice import ahead_tile, gated_ahead_tile, tile_of_summands
from support.kernels.ahead_programs import are_there_at_once, asked_around_wait
from support.kernels.packed_cases import of_shape, tiled
from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches, loop_of

PARTS = AheadTile(outputs=128, num_stages=4, splits=2)
GATED = AheadTile(outputs=64, num_stages=3)
FEW, AHEAD = "_packed_linear_kernel", "_packed_ahead_kernel"


@pytest.mark.parametrize("gate", [Gate.NONE, Gate.GELU])
@pytest.mark.parametrize("name", ["int4 group 32", "nvfp4", "fp8 channel"])
def test_weights_are_asked_for_before_rows_are_waited_for(name: str, gate: Gate) -> None:
    weight = tiled(name, 1024, 1024)
    x_TI = torch.empty(3, 1024, dtype=torch.bfloat16)
    with mock.patch.object(packed_ahead, "starts_early", return_value=True):
        if gate is Gate.NONE:
            launched = compile_launches(lambda: packed_linear_ahead(x_TI, weight, PARTS, out_dtype=torch.float32))
        else:
            launched = compile_launches(lambda: packed_gated_linear_ahead(x_TI, weight, GATED, gate))
    (kernel,) = launched
    assert kernel.shared_bytes <= MAX_SHARED_BYTES // 3, "room for three programs on a multiprocessor"
    assert not kernel.stack_bytes, "registers spill"
    assert not kernel.lost_products
    weights = (1 if name == "fp8 channel" else 2) * (1 if gate is Gate.NONE else 2)
    # Behind the wait: the first rows' two halves, and in the loop of later steps all of a step.
    assert asked_around_wait(kernel) == [weights, 2 + weights + 2]
    loop = loop_of(kernel.ptx)
    assert loop.count("mma.sync") == 16
    assert "ldmatrix" in loop
    assert "st.shared" not in loop, "numbers go through shared memory"


@pytest.mark.parametrize(
    ("name", "num_out", "num_in", "rows", "chosen"),
    [
        ("int4 group 32", 5376, 8192, 1, AheadTile(128, 4, 6, most_registers=96)),
        ("nvfp4", 5376, 8192, 8, AheadTile(128, 4, 6, most_registers=96)),
        ("int4 group 32", 5376, 8192, 9, None),
        ("int4 group 32", 5376, 21504, 8, AheadTile(64, 3, splits=6)),
        ("nvfp4", 5376, 21504, 1, AheadTile(64, 3, splits=6)),
        ("int4 group 32", 5376, 16384, 8, AheadTile(128, 4, 6, most_registers=96)),  # full layers'
        ("int4 group 32", 16384, 5376, 1, AheadTile(128, 4, 2, most_registers=96)),
        ("nvfp4", 16384, 5376, 8, AheadTile(128, 4, 2, most_registers=96)),
        ("nvfp4", 16384, 5376, 9, None),
        ("int4 group 32", 18432, 5376, 1, None),  # full layers': 288 programs, three on some multiprocessors
        ("fp8 channel", 16384, 5376, 1, None),
        ("int4 group 32", 2560, 2048, 1, None),  # E4B's: 80 programs
        ("int4 group 32", 2560, 10240, 1, AheadTile(128, 4, 13, most_registers=96)),
        ("int4 group 32", 8192, 2816, 1, AheadTile(128, 4, 4)),  # 26B-A4B's: parts of 704 inputs
        ("int4 group 32", 1536, 6144, 1, AheadTile(64, 4, 6, most_registers=96)),  # E2B's: one a multiprocessor
        ("int4 group 32", 1536, 6144, 8, AheadTile(64, 4, 6, most_registers=96)),
        ("int4 group 32", 1536, 6144, 9, None),
        ("nvfp4", 1536, 6144, 1, None),  # which was not measured
        ("int4 group 128", 1536, 6144, 1, None),  # whose scales go into sums
        ("int4 group 32", 1536, 12288, 1, None),  # parts of 2,048 inputs, which were slower
        ("int4 group 32", 1536, 4096, 1, None),  # parts of 683
        ("fp8 channel", 5376, 8192, 1, AheadTile(64, 4, 3, most_registers=96)),
        ("fp8 channel", 2560, 10240, 1, AheadTile(64, 4, 7)),  # parts of 1,463
        ("fp8 channel", 5376, 21504, 1, None),
        ("fp8 block 128", 5376, 8192, 1, None),  # whose scales go into sums
        ("int4 group 128", 5376, 8192, 1, None),  # whose scales go into sums
    ],
)
def test_summands_ahead(name: str, num_out: int, num_in: int, rows: int, chosen: AheadTile | None) -> None:
    """As was measured to be faster for 31B's weights, and for E2B's down projection."""
    weight = of_shape(name, num_out, num_in)
    assert ahead_tile(weight, num_out, rows) == chosen
    if chosen is not None:
        assert chosen.splits == tile_of_summands(weight, num_out, 64).splits
        assert are_there_at_once(chosen, num_out), "programs that cannot be there at once"


@pytest.mark.parametrize(
    ("name", "num_out", "num_in", "rows", "chosen"),
    [
        ("int4 group 32", 43008, 5376, 1, GATED),
        ("nvfp4", 43008, 5376, 8, GATED),
        ("nvfp4", 43008, 5376, 9, None),
        ("int4 group 32", 20480, 2560, 1, None),  # E4B's
        ("fp8 channel", 43008, 5376, 1, None),
        ("int4 group 128", 43008, 5376, 1, None),
    ],
)
def test_gated_ahead(name: str, num_out: int, num_in: int, rows: int, chosen: AheadTile | None) -> None:
    assert gated_ahead_tile(of_shape(name, num_out, num_in), rows) == chosen


@pytest.mark.parametrize(
    ("rows", "on_hopper", "comes"), [(1, True, True), (8, True, True), (9, True, False), (8, False, False)]
)
def test_who_writes_the_rows_is_told(rows: int, on_hopper: bool, comes: bool) -> None:
    assert TiledProduct(of_shape("nvfp4", 5376, 8192), on_hopper=on_hopper).comes_ahead(rows) == comes


SHAPES = ((43008, 5376), (16384, 5376), (5376, 8192), (5376, 21504), (1536, 6144))
"""Outputs and inputs, of gate and up rows first."""


@pytest.mark.parametrize("name", ["int4 group 32", "fp8 channel"])
def test_rehearsed_rows_have_every_tile(name: str) -> None:
    """A start rehearses powers of two (`rank/eager_shapes`)."""
    gate_up, *others = (of_shape(name, *shape) for shape in SHAPES)

    def tiles(rows: int) -> list[AheadTile | None]:
        return [gated_ahead_tile(gate_up, rows), *(ahead_tile(weight, weight.num_out, rows) for weight in others)]

    rehearsed = [tiles(rows) for rows in (1, 2, 4, 8, 16, 32, 64)]
    assert all(tiles(rows) in rehearsed for rows in range(1, 65))


@pytest.mark.parametrize(
    ("rows", "on_hopper", "aligned", "served"),
    [(8, True, True, AHEAD), (9, True, True, FEW), (8, False, True, FEW), (8, True, False, FEW)],
)
def test_which_kernel_serves(rows: int, on_hopper: bool, aligned: bool, served: str) -> None:
    def row(width: int) -> torch.Tensor:
        """Rows that the memory accelerator cannot address, if they are not aligned."""
        return torch.empty(rows, width if aligned else width + 1, dtype=torch.bfloat16)[:, :width]

    o, gate_up = (
        TiledProduct(of_shape("int4 group 32", *shape), on_hopper=on_hopper) for shape in ((5376, 8192), (43008, 5376))
    )
    found = compile_launches(lambda: [o.summands(row(8192)), o.wide_summands(row(8192)), gate_up.gelu(row(5376))])
    assert [kernel.name for kernel in found] == [served] * 3


@pytest.mark.parametrize(
    ("name", "rows", "stride", "match"),
    [
        ("nvfp4", 9, 512, "x \\[9, 512\\].*1 to 8 rows"),
        ("nvfp4", 8, 516, "strides \\(516, 1\\)"),
        ("fp8 block 128", 8, 512, "SUMS in units of 128 inputs: scales of rows or of codes"),
    ],
)
def test_what_the_kernel_is_not_for_is_refused(name: str, rows: int, stride: int, match: str) -> None:
    x_TI = torch.empty(rows, stride, dtype=torch.bfloat16)[:, :512]
    with pytest.raises(ValueError, match=match):
        packed_linear_ahead(x_TI, tiled(name, 1024, 512), PARTS, out_dtype=torch.float32)


def test_parts_without_inputs_are_refused() -> None:
    x_TI = torch.empty(8, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"splits=5.* of a weight of 4 units: at most as many parts are allowed"):
        packed_linear_ahead(x_TI, tiled("nvfp4", 1024, 512), replace(PARTS, splits=5), out_dtype=torch.float32)


def test_a_gated_product_is_one_part() -> None:
    with pytest.raises(ValueError, match="one part is allowed"):
        packed_gated_linear_ahead(torch.empty(8, 512), tiled("nvfp4", 1024, 512), PARTS, Gate.GELU)
