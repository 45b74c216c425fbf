"""A single row's products whose scales go into sums: which they are, and what they are compiled to."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.triton import packed_columns
from gemray_kernels.triton.ahead_tile import AheadTile
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_columns import packed_gated_linear_in_columns, packed_linear_in_columns
from gemray_kernels.triton.packed_columns_choice import columns_tile, gated_columns_tile
from gemray_kernels.triton.packed_products import TiledProduct
from gemray_kernels.triton.packed_tile_choice import tile_of_summands
from support.kernels.ahead_programs import are_there_at_once, asked_around_wait
from support.kernels.packed_cases import of_shape, tiled
from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches, loop_of

PARTS = AheadTile(outputs=128, num_stages=3, splits=2, most_registers=96)
GATED = AheadTile(outputs=64, num_stages=3, most_registers=72)
OTHERS = "_packed_ahead_kernel", "_packed_linear_kernel"


@pytest.mark.parametrize("gate", [Gate.NONE, Gate.GELU])
@pytest.mark.parametrize("name", ["int4 group 32", "nvfp4"])
def test_weights_are_asked_for_before_the_row_is_waited_for(name: str, gate: Gate) -> None:
    weight = tiled(name, 1024, 1024)
    x_TI = torch.empty(1, 1024, dtype=torch.bfloat16)
    with mock.patch.object(packed_columns, "starts_early", return_value=True):
        if gate is Gate.NONE:
            launched = compile_launches(lambda: packed_linear_in_columns(x_TI, weight, PARTS, out_dtype=torch.float32))
        else:
            launched = compile_launches(lambda: packed_gated_linear_in_columns(x_TI, weight, GATED, gate))
    (kernel,) = launched
    assert kernel.shared_bytes <= MAX_SHARED_BYTES // 4, "room for four programs on a multiprocessor"
    assert not kernel.stack_bytes, "registers spill"
    assert not kernel.lost_products
    weights = 2 * (1 if gate is Gate.NONE else 2)
    # Behind the wait: the first row, and in the loop of later steps all of a step.
    assert asked_around_wait(kernel) == [weights, 1 + weights + 1]
    loop = loop_of(kernel.ptx)
    offsets = 0 if name == "nvfp4" else 1 if gate is Gate.GELU else 2
    assert loop.count("mma.sync") == 16 + offsets
    assert "st.shared" not in loop, "numbers go through shared memory"
    assert "cvt" not in loop, "numbers are rounded"


@pytest.mark.parametrize(
    ("name", "num_out", "num_in", "chosen"),
    [
        ("int4 group 32", 5376, 8192, AheadTile(128, 3, 6, 96)),
        ("nvfp4", 5376, 21504, AheadTile(128, 4, 6, 96)),
        ("nvfp4", 16384, 5376, AheadTile(128, 3, 2, 96)),
        ("int4 group 32", 18432, 5376, AheadTile(128, 3, 2, 72)),  # full layers': 288 programs
        ("int4 group 32", 2560, 2048, AheadTile(128, 3, 4, 96)),  # E4B's
        ("int4 group 32", 1536, 6144, AheadTile(64, 3, 6, 96)),  # E2B's
        ("nvfp4", 1536, 12288, AheadTile(64, 3, 16, 72)),
        ("fp8 channel", 5376, 8192, None),
        ("int8 channel", 5376, 8192, None),
        ("int4 group 128", 5376, 8192, None),  # whose scales go into sums in any case
    ],
)
def test_summands_in_columns(name: str, num_out: int, num_in: int, chosen: AheadTile | None) -> None:
    """As was measured to be faster."""
    weight = of_shape(name, num_out, num_in)
    assert columns_tile(weight, num_out, 1) == chosen
    if chosen is not None:
        assert chosen.splits == tile_of_summands(weight, num_out, 64).splits
        assert are_there_at_once(chosen, num_out), "programs that cannot be there at once"


@pytest.mark.parametrize(
    ("name", "num_out", "num_in", "chosen"),
    [
        ("int4 group 32", 43008, 5376, AheadTile(64, 3, 1, 72)),
        ("nvfp4", 20480, 2560, AheadTile(64, 4, 1, 96)),  # E4B's
        ("fp8 channel", 43008, 5376, None),
        ("int4 group 128", 43008, 5376, None),
    ],
)
def test_gated_in_columns(name: str, num_out: int, num_in: int, chosen: AheadTile | None) -> None:
    assert gated_columns_tile(of_shape(name, num_out, num_in), 1) == chosen


@pytest.mark.parametrize(
    ("rows", "on_hopper", "aligned", "name", "serves"),
    [
        (1, True, True, "nvfp4", True),
        (1, True, True, "int4 group 32", True),
        (2, True, True, "nvfp4", False),
        (1, False, True, "nvfp4", False),
        (1, True, False, "nvfp4", False),
        (1, True, True, "fp8 channel", False),
    ],
)
def test_which_kernel_serves(rows: int, on_hopper: bool, aligned: bool, name: str, serves: bool) -> None:
    def row(width: int) -> torch.Tensor:
        """Rows that the memory accelerator cannot address, if they are not aligned."""
        return torch.empty(rows, width + 8, dtype=torch.bfloat16)[:, 0 if aligned else 1 :][:, :width]

    o, gate_up = (TiledProduct(of_shape(name, *shape), on_hopper=on_hopper) for shape in ((5376, 8192), (43008, 5376)))
    found = compile_launches(lambda: [o.summands(row(8192)), o.wide_summands(row(8192)), gate_up.gelu(row(5376))])
    if serves:
        assert [kernel.name for kernel in found] == ["_packed_columns_kernel"] * 3
    else:
        assert {kernel.name for kernel in found} <= set(OTHERS)


@pytest.mark.parametrize("on_hopper", [True, False])
def test_who_writes_the_row_is_told(on_hopper: bool) -> None:
    """E4B's o projection, which does not come ahead for more rows than one."""
    product = TiledProduct(of_shape("nvfp4", 2560, 2048), on_hopper=on_hopper)
    assert [product.comes_ahead(rows) for rows in (1, 2)] == [on_hopper, False]


@pytest.mark.parametrize(
    ("name", "rows", "skipped", "match"),
    [
        ("nvfp4", 2, 0, "x \\[2, 512\\].*one row"),
        ("nvfp4", 1, 1, "multiple of 16 bytes"),
        ("fp8 channel", 1, 0, "ROW in units of 128 inputs: scales of codes"),
    ],
)
def test_what_the_kernel_is_not_for_is_refused(name: str, rows: int, skipped: int, match: str) -> None:
    x_TI = torch.empty(rows, 520, dtype=torch.bfloat16)[:, skipped : 512 + skipped]
    with pytest.raises(ValueError, match=match):
        packed_linear_in_columns(x_TI, tiled(name, 1024, 512), PARTS, out_dtype=torch.float32)


def test_small_units_are_served_by_others() -> None:
    weight = tiled("nvfp4", 1024, 192)
    assert weight.unit.inputs == 64
    assert columns_tile(weight, 1024, 1) is None
    assert gated_columns_tile(weight, 1) is None


def test_parts_without_inputs_are_refused() -> None:
    x_TI = torch.empty(1, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"splits=5.* of a weight of 4 units: at most as many parts are allowed"):
        packed_linear_in_columns(x_TI, tiled("nvfp4", 1024, 512), replace(PARTS, splits=5), out_dtype=torch.float32)


def test_a_gated_product_is_one_part() -> None:
    with pytest.raises(ValueError, match="one part is allowed"):
        packed_gated_linear_in_columns(torch.empty(1, 512), tiled("nvfp4", 1024, 512), PARTS, Gate.GELU)
