"""Products with packed weights where there is no GPU: interpreted on the CPU, and compiled for Hopper."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.packed_tiles import UNITS, laid_out
from gemray_kernels.triton.packed_prompts import packed_prompt_linear
from gemray_kernels.triton.packed_tile_choice import prompt_tile
from support.kernels.packed_cases import EXPERTS, FORMATS, random_packed
from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches
from support.waiting import HANG_S

TOLERANCE = 1e-6


def test_interpreted_kernels_equal_the_reference() -> None:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("interpret_packed.py")
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert len(lines) == len(FORMATS) * 2 * 4 + len(EXPERTS) * 2
    assert not [line for line in lines if not float(line[1]) < TOLERANCE]


def loop_of(ptx: str) -> str:
    """The longest of a kernel's loops."""
    labels = {found[1]: found.start() for found in re.finditer(r"^(\$L\w+):", ptx, re.MULTILINE)}
    branches = [(labels.get(found[1], len(ptx)), found.start()) for found in re.finditer(r"bra\S*\s+(\$L\w+);", ptx)]
    first, last = max(branches, key=lambda branch: branch[1] - branch[0])
    assert first < last
    return ptx[first:last]


def test_no_product_goes_on_while_its_registers_are_written() -> None:
    """Int8, whose products are long: each step waits for its own, as the next one writes the same registers."""
    weight = random_packed(FORMATS["int8 channel"], 512, 512, device="cpu")
    assert weight.tiling is not None
    tiled = laid_out(weight, weight.tiling)
    tile = prompt_tile(tiled, 200)
    assert tile is not None
    x_TI = torch.empty(200, 512, dtype=torch.bfloat16)
    found = compile_launches(lambda: packed_prompt_linear(x_TI, tiled, tile, out_dtype=torch.bfloat16))
    loop = loop_of(found[0].ptx)
    assert "wgmma.mma_async" in loop
    assert loop.rindex("wgmma.wait_group") > loop.rindex("wgmma.mma_async")


@pytest.mark.parametrize("name", ["int4 group 32", "nvfp4", "fp8 channel"])
def test_a_prompt_s_units_are_multiplied_without_a_wait_inside(name: str) -> None:
    """All numbers of a unit are made before its first tile product, in registers, and one wait follows the last."""
    weight = random_packed(FORMATS[name], 512, 512, device="cpu")
    assert weight.tiling is not None
    tiled = laid_out(weight, weight.tiling)
    x_TI = torch.empty(200, 512, dtype=torch.bfloat16)
    tile = prompt_tile(tiled, 200)
    assert tile is not None
    found = compile_launches(lambda: packed_prompt_linear(x_TI, tiled, tile, out_dtype=torch.bfloat16))
    assert found[0].shared_bytes <= MAX_SHARED_BYTES
    assert not found[0].stack_bytes, "registers spill"
    loop = loop_of(found[0].ptx)
    assert loop.count("wgmma.mma_async") == tile.outputs // 128 * UNITS[tiled.code].inputs // 16
    assert loop.count("wgmma.wait_group") == 1
    assert "st.shared" not in loop, "numbers go through shared memory"


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
    """With eight rows on the right, half as many as with sixteen on the left; scales are not written twice."""
    from gemray_kernels.triton.packed_products import TiledProduct

    weight = random_packed(FORMATS[name], 8448, 512, device="cpu")
    assert weight.tiling is not None
    product = TiledProduct(laid_out(weight, weight.tiling))
    found = compile_launches(lambda: product.summands(torch.empty(8, 512, dtype=torch.bfloat16)))
    loop = loop_of(found[0].ptx)
    assert loop.count("mma.sync") == tile_products
    assert "prmt" not in loop


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
