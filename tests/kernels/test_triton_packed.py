"""Products with packed weights where there is no GPU: interpreted on the CPU, and compiled for Hopper."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.packed_tiles import laid_out
from gemray_kernels.packed_weight import CodeName
from gemray_kernels.triton.packed_products import TiledProduct
from gemray_kernels.triton.packed_prompts import PromptTile, packed_prompt_linear
from gemray_kernels.triton.packed_tile_choice import PROMPT_TILES, prompt_tile
from support.kernels.interpreted import interpreted
from support.kernels.packed_cases import EXPERTS, FORMATS, random_packed
from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches, loop_of

TOLERANCE = 1e-6
FEW_BYTES = 16
"""Bytes of a thread's stack, where what a loop does not need may wait for its end."""


def test_interpreted_kernels_equal_the_reference() -> None:
    lines = [line.split("\t") for line in interpreted("packed").splitlines()]
    assert len(lines) == len(FORMATS) * 3 * 3 + len(EXPERTS) * 2
    assert not [line for line in lines if not float(line[1]) < TOLERANCE]


@pytest.mark.parametrize(
    ("name", "tile", "dtype"),
    [
        ("int4 group 32", PROMPT_TILES[0], torch.bfloat16),
        ("int4 group 32", PROMPT_TILES[1], torch.float32),
        ("int4 group 128", PROMPT_TILES[1], torch.bfloat16),
        ("int8 channel", PROMPT_TILES[0], torch.float32),
        ("fp8 channel", PROMPT_TILES[1], torch.bfloat16),
        ("nvfp4", PROMPT_TILES[2], torch.bfloat16),
        ("nvfp4", PROMPT_TILES[3], torch.float32),
        ("fp8 block 128", PROMPT_TILES[0], torch.float32),
    ],
    ids=str,
)
def test_a_prompt_s_products_follow_each_other(name: str, tile: PromptTile, dtype: torch.dtype) -> None:
    """A wait for each half of a step follows the products of both, from registers, and the assembler adds none."""
    weight = random_packed(FORMATS[name], 1024, 512, device="cpu")
    assert weight.tiling is not None
    tiled = laid_out(weight, weight.tiling)
    x_TI = torch.empty(200, 512, dtype=torch.bfloat16)
    (kernel,) = compile_launches(lambda: packed_prompt_linear(x_TI, tiled, tile, out_dtype=dtype))
    assert kernel.shared_bytes <= MAX_SHARED_BYTES
    assert (kernel.stack_bytes or 0) <= FEW_BYTES, "registers spill"
    loop = loop_of(kernel.ptx)
    assert loop.count("wgmma.mma_async") == tile.outputs // 64 * 128 // 16
    assert re.findall(r"wgmma.wait_group\S* (\d+);", loop) == ["1", "0"]
    assert loop.index("wgmma.wait_group") > loop.rindex("wgmma.mma_async")
    assert "ldmatrix" in loop
    assert "st.shared" not in loop, "numbers go through shared memory"
    assert kernel.product_waits in (2 * tile.groups, None)


@pytest.mark.parametrize(
    ("code", "num_out", "num_in", "num_rows", "most_splits", "chosen"),
    [
        ("int4", 16384, 5376, 512, 1, PROMPT_TILES[2]),  # 256 tiles for 132 multiprocessors
        ("int4", 43008, 5376, 512, 1, PROMPT_TILES[1]),  # 896 tiles; of the larger ones 672, which take longer
        ("fp8", 43008, 5376, 512, 1, PROMPT_TILES[1]),
        ("int4", 5376, 21504, 512, 3, replace(PROMPT_TILES[2], splits=3)),  # 252 tiles
        ("int4", 5376, 8192, 512, 3, PROMPT_TILES[1]),  # as many parts would cost more of the shorter sums
        ("int4", 5376, 21504, 4096, 3, PROMPT_TILES[1]),
        ("fp8", 5376, 21504, 2048, 3, PROMPT_TILES[2]),
        ("int4", 16384, 5376, 128, 1, PROMPT_TILES[3]),
        ("nvfp4", 16384, 5376, 512, 1, PROMPT_TILES[2]),  # half as many numbers to decode
    ],
)
def test_a_prompt_s_tile_keeps_multiprocessors_at_work(
    code: CodeName, num_out: int, num_in: int, num_rows: int, most_splits: int, chosen: PromptTile
) -> None:
    """As was measured to be fastest for 31B's weights."""
    assert prompt_tile(code, num_out, num_in, num_rows, most_splits=most_splits) == chosen


@pytest.mark.parametrize(("capability", "kernel"), [((9, 0), "_packed_prompt_kernel"), ((10, 0), "_dequantize_kernel")])
def test_other_cards_than_hopper_s_write_a_prompt_s_numbers_down(
    capability: tuple[int, int], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemray_kernels.table import kernels_for

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    kernels = kernels_for(torch.device("cuda"), torch.bfloat16)
    product = kernels.packed_product(random_packed(FORMATS["fp8 channel"], 1024, 512, device="cpu"))
    found = compile_launches(lambda: product.linear(torch.zeros(200, 512, dtype=torch.bfloat16)))
    assert [launch.name for launch in found] == [kernel]


def test_rows_that_the_memory_accelerator_cannot_address_are_refused() -> None:
    weight = random_packed(FORMATS["int4 group 32"], 1024, 512, device="cpu")
    assert weight.tiling is not None
    tiled = laid_out(weight, weight.tiling)
    x_TI = torch.empty(200, 516, dtype=torch.bfloat16)[:, :512]
    with pytest.raises(ValueError, match="strides \\(516, 1\\)"):
        packed_prompt_linear(x_TI, tiled, PROMPT_TILES[0], out_dtype=torch.bfloat16)


def test_products_compile_for_hopper() -> None:
    """Words go from shared memory to the tensor cores' registers: numbers are never stored on the way."""
    from gemray_kernels.triton.packed_products import TiledProduct

    weight = random_packed(FORMATS["int4 group 32"], 8448, 512, device="cpu")
    assert weight.tiling is not None
    product = TiledProduct(laid_out(weight, weight.tiling))
    few, many = (torch.empty(rows, 512, dtype=torch.bfloat16) for rows in (8, 64))
    found = compile_launches(lambda: [product.summands(few), product.summands(many)])
    assert len(found) == 2
    for kernel in found:
        assert kernel.shared_bytes <= MAX_SHARED_BYTES
        assert not kernel.stack_bytes, "registers spill"
        loop = loop_of(kernel.ptx)
        assert "cp.async" in loop, "words are not loaded ahead of their use"
        assert "st.shared" not in loop, "numbers go through shared memory"
        assert "ldmatrix" in loop


@pytest.mark.parametrize(("name", "tile_products"), [("int4 group 32", 16), ("nvfp4", 16)])
def test_few_rows_take_a_tile_product_for_256_numbers(name: str, tile_products: int) -> None:
    """With eight rows on the right, half as many as with sixteen on the left; scales are not written twice.

    Bytes change places in scales of NVFP4 alone, once for two of them.
    """
    from gemray_kernels.triton.packed_products import TiledProduct

    weight = random_packed(FORMATS[name], 8448, 512, device="cpu")
    assert weight.tiling is not None
    product = TiledProduct(laid_out(weight, weight.tiling))
    found = compile_launches(lambda: product.summands(torch.empty(8, 512, dtype=torch.bfloat16)))
    loop = loop_of(found[0].ptx)
    assert loop.count("mma.sync") == tile_products
    assert loop.count("prmt") == loop.count("prmt.b32 odd")
    assert "st.shared" not in loop, "numbers go through shared memory"


def test_experts_compile_for_hopper() -> None:
    """Few rows, whose pairs the programs find, and many, whose pairs are listed."""
    from gemray_kernels.triton.packed_experts import TiledExperts

    gate_up, down = (random_packed(FORMATS["nvfp4"], *shape, device="cpu", num_experts=4) for shape in SHAPES)
    assert gate_up.tiling is not None
    assert down.tiling is not None
    experts = TiledExperts(laid_out(gate_up, gate_up.tiling), laid_out(down, down.tiling))
    found = compile_launches(
        lambda: [
            experts.outputs(torch.empty(rows, 256, dtype=torch.bfloat16), torch.zeros(rows, 2, dtype=torch.int64))
            for rows in (8, 300)
        ]
    )
    assert len(found) == 2 + 3
    for kernel in found:
        assert kernel.shared_bytes <= MAX_SHARED_BYTES
        assert not kernel.stack_bytes, "registers spill"


SHAPES = ((1408, 256), (256, 704))
"""Outputs and inputs of an expert's two layers, of the published width."""


def test_a_layer_s_gate_is_one_kernel_before_the_packed_product() -> None:
    """The gate is a sum of parts, an activation and a product: the second half of a per-layer embedding."""
    weight = random_packed(FORMATS["int4 group 32"], 512, 256, device="cpu")
    assert weight.tiling is not None
    product = TiledProduct(laid_out(weight, weight.tiling))
    summands_STI = torch.empty(4, 3, 256)
    factor_TI = torch.empty(3, 256, dtype=torch.bfloat16)
    kernels = compile_launches(lambda: product.gated_projection(summands_STI, factor_TI))
    assert [kernel.name for kernel in kernels] == ["_gate_kernel", "_packed_linear_kernel"]
