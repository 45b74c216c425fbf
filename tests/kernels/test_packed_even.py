"""Products whose work programs share evenly: which tiles there are, what they are compiled to, and how they add up."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.packed_weight import Scaling
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_even import EvenTile, packed_even_gated_linear, packed_even_linear
from gemray_kernels.triton.packed_even_choice import Product, even_tile, gated_even_tile
from gemray_kernels.triton.packed_products import TiledProduct
from support.kernels.interpreted import interpreted
from support.kernels.packed_cases import tiled
from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches, launches_of, loop_of


def test_interpreted_shares_add_up() -> None:
    assert interpreted("packed_even") == "4 cases\n"


A, B, D = (128, 2), (64, 3), (64, 2)
"""Outputs of a group, and groups."""
MOST_SPILLED = 16
"""Bytes that Triton 3.9's assembler puts away around the loop; that of 3.6 puts none."""
EVEN, MANY = "packed_even_kernel", "_packed_prompt_kernel"


@pytest.mark.parametrize(
    ("name", "gate", "tile"),
    [
        ("int4 group 32", Gate.GELU, EvenTile(*A, rows=64, more=16, shares=True)),
        ("int4 group 32", Gate.SILU, EvenTile(*B, rows=128, more=32, shares=True)),
        ("int4 group 32", Gate.NONE, EvenTile(*D, rows=128, more=32)),
        ("int4 group 32", Gate.NONE, EvenTile(*B, rows=64, more=16, splits=4)),
    ],
)
def test_numbers_go_from_registers_to_the_tensor_cores(name: str, gate: Gate, tile: EvenTile) -> None:
    """Products of a half are under way while the next is decoded, and the assembler adds no wait."""
    weight = tiled(name, 1024, 512)
    x_TI = torch.empty(tile.rows + tile.more - 3, 512, dtype=torch.bfloat16)
    if gate is Gate.NONE:
        dtype = torch.bfloat16 if tile.splits == 1 else torch.float32
        launched = compile_launches(lambda: packed_even_linear(x_TI, weight, tile, out_dtype=dtype))
    else:
        launched = compile_launches(lambda: packed_even_gated_linear(x_TI, weight, tile, gate))
    assert [kernel.name for kernel in launched] == ["packed_even_kernel", "_add_rest_kernel"][: 1 + tile.shares]
    kernel = launched[0]
    assert kernel.shared_bytes <= MAX_SHARED_BYTES
    assert all((kernel.stack_bytes or 0) <= MOST_SPILLED for kernel in launched), "registers spill"
    assert not kernel.lost_products
    loop = loop_of(kernel.ptx)
    assert loop.count("wgmma.mma_async") == tile.outputs // 64 * 128 // 16 * (2 if tile.more else 1)
    assert re.findall(r"wgmma.wait_group\S* (\d+);", loop) == ["2" if tile.more else "1", "0"]
    assert "st.shared" not in loop, "numbers go through shared memory"
    assert kernel.product_waits in (tile.groups * 2, None)


def test_what_does_not_fit_is_refused() -> None:
    weight = tiled("int4 group 32", 1040, 512)
    tile = EvenTile(*B, rows=64, more=16)
    with pytest.raises(ValueError, match="1 to 80 rows"):
        packed_even_linear(torch.empty(81, 512, dtype=torch.bfloat16), weight, tile, out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="one part and a multiple of 8"):
        packed_even_gated_linear(
            torch.empty(80, 512, dtype=torch.bfloat16), weight, EvenTile(*B, rows=64, more=16, splits=2), Gate.GELU
        )


@pytest.mark.parametrize(
    ("num_out", "num_in", "rows", "chosen"),
    [
        (16384, 5376, 65, EvenTile(*D, rows=64, more=16)),
        (5376, 8192, 80, EvenTile(*B, rows=64, more=16, splits=4)),
        (5376, 21504, 80, EvenTile(*B, rows=64, more=16, splits=4)),
        (16384, 5376, 129, EvenTile(*D, rows=128, more=32)),
        (18432, 5376, 160, EvenTile(*B, rows=128, more=32)),  # 144 tiles of two groups
        (5376, 8192, 160, EvenTile(*D, rows=128, more=32, splits=3)),
        (5376, 21504, 160, EvenTile(*D, rows=128, more=32, splits=3)),
        (16384, 5376, 81, None),
        (16384, 5376, 128, None),
        (16384, 5376, 161, None),
    ],
)
def test_tiles_of_summands(num_out: int, num_in: int, rows: int, chosen: EvenTile | None) -> None:
    """As was measured to be faster for 31B's weights in four bits; others were not timed."""
    assert even_tile(Product("int4", Scaling.CODES, num_out, num_in), rows) == chosen
    assert even_tile(Product("fp8", Scaling.ROW, num_out, num_in), rows) is None
    assert even_tile(Product("int4", Scaling.SUMS, num_out, num_in), rows) is None


@pytest.mark.parametrize(
    ("num_out", "rows", "chosen"),
    [
        (43008, 80, EvenTile(*A, rows=64, more=16, shares=True)),
        (43008, 129, EvenTile(*B, rows=128, more=32, shares=True)),
        (43008, 128, None),
        (21504, 80, None),  # 84 tiles
    ],
)
def test_tiles_of_gated_products(num_out: int, rows: int, chosen: EvenTile | None) -> None:
    assert gated_even_tile(Product("int4", Scaling.CODES, num_out, 5376), rows) == chosen


@pytest.mark.parametrize(
    ("rows", "kernel"),
    [(65, EVEN), (80, EVEN), (81, MANY), (128, MANY), (129, EVEN), (160, EVEN), (161, MANY)],
)
def test_which_kernel_serves(rows: int, kernel: str) -> None:
    """By the number of rows, also a product without parts and one in float32."""
    product = TiledProduct(tiled("int4 group 32", 1024, 512))
    x_TI = torch.empty(rows, 512, dtype=torch.bfloat16)
    products = (product.linear, product.summands, product.wide_summands)
    assert launches_of(lambda: [of(x_TI) for of in products]) == [kernel] * 3


def test_rows_that_the_memory_accelerator_cannot_address_have_their_numbers_written_down() -> None:
    product = TiledProduct(tiled("int4 group 32", 1024, 512))
    x_TI = torch.empty(80, 516, dtype=torch.bfloat16)[:, :512]
    assert launches_of(lambda: product.gelu(x_TI))[0] == "_dequantize_kernel"
