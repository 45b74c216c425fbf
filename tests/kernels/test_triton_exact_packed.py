"""Packed weights in exact numerics where there is no GPU: interpreted on the CPU, and compiled for Hopper."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.packed_tiles import TiledWeight, laid_out
from support.kernels.interpreted import interpreted
from support.kernels.packed_cases import FORMATS, random_packed
from support.kernels.triton_compile import MAX_SHARED_BYTES, Compiled, compile_launches


@pytest.mark.slow
def test_interpreted_products_are_the_references() -> None:
    assert interpreted("exact_packed").splitlines() == ["done"]


def tiled(name: str, num_out: int, num_in: int, leaves: int, num_experts: int | None = None) -> TiledWeight:
    weight = random_packed(FORMATS[name], num_out, num_in, device="cpu", num_experts=num_experts, leaves=leaves)
    assert weight.tiling is not None
    return laid_out(weight, weight.tiling)


def check(found: list[Compiled]) -> None:
    for kernel in found:
        assert kernel.shared_bytes <= MAX_SHARED_BYTES
        assert not kernel.stack_bytes, "registers spill"
        assert not kernel.lost_products


ONE_ORDER = {"2"}
"""Neighbouring inputs that a thread holds of 16-bit operands. With 4, as of operands that were loaded as bytes, a tile
product adds up inputs in another order than those of plain weights."""


@pytest.mark.parametrize("name", ["int4 group 32", "fp8 channel", "fp8 block 128", "nvfp4"])
def test_products_compile_for_hopper_in_the_order_of_plain_ones(name: str) -> None:
    """One leaf of many outputs, and eight, of which a program adds up some; 1 to 64 rows, and prompts."""
    from gemray_kernels.triton.exact_packed import TiledExactProduct

    for num_out, num_in, leaves in ((8448, 512, 1), (5376, 4096, 8)):
        product = TiledExactProduct(tiled(name, num_out, num_in, leaves))
        for rows in (1, 32, 64):
            x_TI = torch.empty(rows, num_in, dtype=torch.bfloat16)
            (kernel,) = compile_launches(lambda product=product, x_TI=x_TI: product.summands(x_TI))  # type: ignore[misc]
            check([kernel])
            assert "wgmma" in kernel.ptx or (rows <= 16 and "mma.sync" in kernel.ptx)
            assert set(re.findall(r"kWidth = (\d+)", kernel.layouts)) == ONE_ORDER
            assert "cp.async" in kernel.ptx, "words are not loaded ahead of their use"
        many = torch.empty(300, num_in, dtype=torch.bfloat16)
        found = compile_launches(lambda product=product, many=many: product.summands(many))  # type: ignore[misc]
        names = [kernel.name for kernel in found]
        if leaves == 1 and name != "fp8 block 128":  # whose scales are no parts
            assert names == ["_packed_prompt_kernel"]
            assert set(re.findall(r"kWidth = (\d+)", found[0].layouts)) == ONE_ORDER
        else:
            assert names[0] == "_dequantize_kernel"
            assert len(names) == 2


@pytest.mark.parametrize("name", ["int4 group 32", "fp8 block 128", "nvfp4"])
def test_leaves_that_cut_groups_have_that_order_too(name: str) -> None:
    """26B-A4B's, of 264 and 88 inputs."""
    from gemray_kernels.triton.exact_packed import TiledExactProduct
    from gemray_kernels.triton.exact_packed_experts import TiledExactExperts

    product = TiledExactProduct(tiled(name, 2816, 2112, 8))
    experts = TiledExactExperts(tiled(name, 1408, 256, 1, 4), tiled(name, 256, 704, 8, 4))
    for rows in (1, 64, 300):
        x_TI, x_TH = (torch.empty(rows, num_in, dtype=torch.bfloat16) for num_in in (2112, 256))
        chosen = torch.zeros(rows, 2, dtype=torch.int64)
        found = compile_launches(lambda x_TI=x_TI: product.summands(x_TI))[:1]  # type: ignore[misc]
        found += compile_launches(lambda x_TH=x_TH, chosen=chosen: experts.outputs(x_TH, chosen))  # type: ignore[misc]
        check(found)
        assert {held for kernel in found for held in re.findall(r"kWidth = (\d+)", kernel.layouts)} == ONE_ORDER


@pytest.mark.parametrize("name", ["int4 group 32", "fp8 channel", "nvfp4"])
def test_gated_products_compile_for_hopper_as_one_kernel(name: str) -> None:
    from gemray_kernels.triton.exact_packed import TiledExactProduct

    product = TiledExactProduct(tiled(name, 8448, 512, 1))
    for rows in (1, 64):
        x_TH = torch.empty(rows, 512, dtype=torch.bfloat16)
        (kernel,) = compile_launches(lambda x_TH=x_TH: product.gelu(x_TH))  # type: ignore[misc]
        check([kernel])
        assert set(re.findall(r"kWidth = (\d+)", kernel.layouts)) == ONE_ORDER


@pytest.mark.parametrize("name", ["int8 channel", "nvfp4"])
def test_experts_compile_for_hopper_in_the_order_of_plain_ones(name: str) -> None:
    """Few rows, whose pairs the programs find, and many, whose pairs are listed; 26B-A4B's width where that is cut."""
    from gemray_kernels.triton.exact_packed_experts import TiledExactExperts

    width = 704 if name == "int8 channel" else 1024
    experts = TiledExactExperts(tiled(name, 2 * width, 256, 1, 4), tiled(name, 256, width, 8, 4))
    for rows, kernels in ((8, 2), (300, 3)):
        x_TH, chosen = torch.empty(rows, 256, dtype=torch.bfloat16), torch.zeros(rows, 2, dtype=torch.int64)
        found = compile_launches(lambda x_TH=x_TH, chosen=chosen: experts.subtrees(x_TH, chosen))  # type: ignore[misc]
        assert len(found) == kernels
        check(found)
        assert {held for kernel in found for held in re.findall(r"kWidth = (\d+)", kernel.layouts)} == ONE_ORDER
