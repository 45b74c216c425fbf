"""Products of a verify step's rows with packed weights: which kernel serves them, and what it is compiled to."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_products import TiledProduct
from gemray_kernels.triton.packed_tile_choice import gated_verify_tile, tile_of_summands, verify_tile
from gemray_kernels.triton.packed_verify import VerifyTile, packed_verify_gated_linear, packed_verify_linear
from support.kernels.packed_cases import of_shape, tiled
from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches, launches_of, loop_of

GATED = VerifyTile(groups=3, rows=64)
PARTS = VerifyTile(groups=4, rows=32, splits=2)
FEW, VERIFY, MANY = "_packed_linear_kernel", "_packed_verify_kernel", "_packed_prompt_kernel"


@pytest.mark.parametrize(
    ("name", "gate"),
    [("int4 group 32", Gate.GELU), ("nvfp4", Gate.NONE), ("nvfp4", Gate.GELU), ("fp8 channel", Gate.SILU)],
)
def test_a_half_is_decoded_while_the_one_before_is_multiplied(name: str, gate: Gate) -> None:
    """One half's products are under way until a step ends, from registers, and the assembler adds no wait."""
    weight = tiled(name, 1024, 512)
    x_TI = torch.empty(30, 512, dtype=torch.bfloat16)
    if gate is Gate.NONE:
        groups, tiles, waits = 4, 1, ["1", "0"]
        launched = compile_launches(lambda: packed_verify_linear(x_TI, weight, PARTS, out_dtype=torch.float32))
    else:
        groups, tiles, waits = 3, 2, ["1", "1", "1", "0"]
        launched = compile_launches(lambda: packed_verify_gated_linear(x_TI, weight, GATED, gate))
    (kernel,) = launched
    assert kernel.shared_bytes <= MAX_SHARED_BYTES
    assert not kernel.stack_bytes, "registers spill"
    assert not kernel.lost_products
    loop = loop_of(kernel.ptx)
    assert loop.count("wgmma.mma_async") == tiles * 128 // 16
    assert re.findall(r"wgmma.wait_group\S* (\d+);", loop) == waits
    assert "st.shared" not in loop, "numbers go through shared memory"
    assert "ldmatrix" in loop
    assert kernel.product_waits in (groups * len(waits), None)


@pytest.mark.parametrize(
    ("name", "num_out", "num_in", "rows", "chosen"),
    [
        ("nvfp4", 16384, 5376, 17, VerifyTile(groups=4, rows=32, splits=2)),
        ("nvfp4", 5376, 21504, 32, VerifyTile(groups=4, rows=32, splits=6)),
        ("nvfp4", 16384, 5376, 16, None),
        ("nvfp4", 16384, 5376, 40, None),
        ("nvfp4", 18432, 5376, 32, None),  # 144 programs for 132 multiprocessors
        ("nvfp4", 5376, 8192, 32, None),  # six parts of so few inputs
        ("int4 group 32", 16384, 5376, 24, VerifyTile(groups=4, rows=32, splits=2)),
        ("int4 group 32", 5376, 21504, 64, None),
        ("fp8 channel", 16384, 5376, 24, None),
    ],
)
def test_summands_of_verify_rows(name: str, num_out: int, num_in: int, rows: int, chosen: VerifyTile | None) -> None:
    """As was measured to be faster for 31B's weights."""
    assert verify_tile(of_shape(name, num_out, num_in), num_out, rows) == chosen


@pytest.mark.parametrize(
    ("name", "num_out", "num_in", "rows", "chosen"),
    [
        ("int4 group 32", 43008, 5376, 17, VerifyTile(groups=3, rows=32)),
        ("int4 group 32", 43008, 5376, 40, VerifyTile(groups=3, rows=64)),
        ("int4 group 32", 43008, 5376, 16, None),
        ("int4 group 32", 21504, 5376, 40, None),  # 56 programs
        ("int4 group 128", 43008, 5376, 40, None),  # whose scales would go into numbers
        ("nvfp4", 43008, 5376, 64, VerifyTile(groups=3, rows=64)),
        ("fp8 channel", 43008, 5376, 40, VerifyTile(groups=3, rows=64)),
        ("fp8 channel", 43008, 5376, 32, None),
    ],
)
def test_gated_verify_rows(name: str, num_out: int, num_in: int, rows: int, chosen: VerifyTile | None) -> None:
    assert gated_verify_tile(of_shape(name, num_out, num_in), rows) == chosen


@pytest.mark.parametrize("name", ["int4 group 32", "int4 group 128", "nvfp4", "int8 channel", "fp8 channel"])
def test_rows_are_summed_in_the_parts_of_few_rows(name: str) -> None:
    """A row's bits may not depend on how many others there are, so neither may its parts."""
    for num_out, num_in in ((16384, 5376), (5376, 8192), (5376, 21504)):
        weight = of_shape(name, num_out, num_in)
        for rows in (17, 32, 33, 64):
            tile = verify_tile(weight, num_out, rows)
            assert tile is None or tile.splits == tile_of_summands(weight, num_out, 1).splits


@pytest.mark.parametrize("name", ["int4 group 32", "nvfp4", "fp8 channel"])
def test_rehearsed_rows_have_every_tile(name: str) -> None:
    """A start rehearses powers of two, and one row more than 32 (`rank/eager_shapes`)."""
    gate_up, qkv, down = (of_shape(name, *shape) for shape in ((43008, 5376), (16384, 5376), (5376, 21504)))

    def tiles(rows: int) -> list[VerifyTile | None]:
        return [
            gated_verify_tile(gate_up, rows),
            verify_tile(qkv, qkv.num_out, rows),
            verify_tile(down, down.num_out, rows),
        ]

    rehearsed = [tiles(rows) for rows in (1, 2, 4, 8, 16, 32, 33, 64)]
    assert all(tiles(rows) in rehearsed for rows in range(1, 65))


@pytest.mark.parametrize(
    ("rows", "on_hopper", "aligned", "summands", "gelu"),
    [
        (16, True, True, FEW, FEW),
        (24, True, True, VERIFY, VERIFY),
        (40, True, True, FEW, VERIFY),
        (24, False, True, FEW, FEW),
        (24, True, False, FEW, FEW),  # which the memory accelerator cannot address
        (65, True, True, MANY, MANY),
    ],
)
def test_which_kernel_serves(rows: int, on_hopper: bool, aligned: bool, summands: str, gelu: str) -> None:
    weight, gate_up = of_shape("nvfp4", 16384, 5376), of_shape("nvfp4", 43008, 5376)
    x_TI = torch.empty(rows, 5376 if aligned else 5377, dtype=torch.bfloat16)[:, :5376]
    product, gated = (TiledProduct(of, on_hopper=on_hopper) for of in (weight, gate_up))
    assert launches_of(lambda: [product.summands(x_TI), product.wide_summands(x_TI)]) == [summands] * 2
    assert launches_of(lambda: gated.gelu(x_TI))[0] == gelu


@pytest.mark.parametrize(
    ("name", "rows", "stride", "match"),
    [
        ("nvfp4", 33, 512, "x \\[33, 512\\].*1 to 32 rows"),
        ("nvfp4", 8, 516, "strides \\(516, 1\\)"),
        ("fp8 block 128", 8, 512, "SUMS: scales of rows or of codes are allowed"),
    ],
)
def test_what_a_tile_is_not_for_is_refused(name: str, rows: int, stride: int, match: str) -> None:
    weight = tiled(name, 1024, 512)
    x_TI = torch.empty(rows, stride, dtype=torch.bfloat16)[:, :512]
    with pytest.raises(ValueError, match=match):
        packed_verify_linear(x_TI, weight, PARTS, out_dtype=torch.float32)


def test_a_gated_product_is_one_part() -> None:
    with pytest.raises(ValueError, match="one part is allowed"):
        packed_verify_gated_linear(torch.empty(8, 512), tiled("nvfp4", 1024, 512), PARTS, Gate.GELU)
