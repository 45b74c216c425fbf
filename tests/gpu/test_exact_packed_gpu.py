"""Packed weights in exact numerics on CUDA: the bits of plain weights of the same numbers, whatever the rows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from gemray_kernels.numerics import NUM_SHARDS, leaves_of, tree_sum
from gemray_kernels.packed_tiles import TiledWeight, laid_out
from support.kernels.capture import captured_and_eager
from support.kernels.kernel_parity import poisoned_memory
from support.kernels.packed_cases import EXPERTS, FORMATS, PackedFormat, copied, random_packed

pytestmark = pytest.mark.gpu

SHAPES = {
    "31B qkv": (16384, 5376, None),
    "31B o": (5376, 8192, NUM_SHARDS),
    "31B gate_up": (43008, 5376, None),
    "31B down": (5376, 21504, NUM_SHARDS),
    "E4B qkv": (3072, 2560, None),
    "E4B down": (2560, 10240, NUM_SHARDS),
    "E4B layer gate": (256, 2560, None),
    "31B down of a rank of 8": (5376, 2688, 1),
}
"""Outputs, inputs and leaves; None where `leaves_of` says how many."""
CUT = {"26B-A4B down": (2816, 2112, NUM_SHARDS)}
"""A shape whose leaves end inside units, and inside groups of any size."""
ROWS = (1, 2, 8, 16, 17, 32, 33, 64, 65, 300)
NUM_EXPERTS, TOP_K = 12, 4


def random_rows(rows: int, num_in: int, seed: int) -> Tensor:
    """Magnitudes that differ between rows and inputs, as activations' do, show more of an order than even ones."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, num_in, generator=generator, device="cuda")
    return (x * torch.randn(rows, num_in, generator=generator, device="cuda").exp()).bfloat16()


@dataclass(frozen=True)
class Layer:
    """A packed weight, and its numbers in bfloat16."""

    tiled: TiledWeight
    numbers_OI: Tensor
    unpacked_OI: Tensor
    """As the reference unpacks them."""


def layer(name: str | PackedFormat, shape: tuple[int, int, int | None], num_experts: int | None = None) -> Layer:
    from gemray_kernels.reference.packed_linear import dequantized as unpacked
    from gemray_kernels.triton.packed_dequantize import dequantized

    num_out, num_in, leaves = shape
    weight = random_packed(
        FORMATS[name] if isinstance(name, str) else name,
        num_out,
        num_in,
        device="cuda",
        seed=num_out,
        num_experts=num_experts,
        leaves=leaves_of(num_out, num_in) if leaves is None else leaves,
    )
    assert weight.tiling is not None
    unpacked_OI = unpacked(copied(weight), torch.bfloat16)
    tiled = laid_out(weight, weight.tiling)
    each = [tiled] if num_experts is None else [expert(tiled, number) for number in range(num_experts)]
    numbers_OI = torch.stack([dequantized(one) for one in each])
    return Layer(tiled, numbers_OI if num_experts is not None else numbers_OI[0], unpacked_OI)


def expert(weight: TiledWeight, number: int) -> TiledWeight:
    return replace(
        weight,
        words_BOC=weight.words_BOC[number],
        scale_BO=weight.scale_BO[number],
        factor_O=weight.factor_O[number],
    )


@pytest.mark.parametrize("shape", [*SHAPES, *CUT])
@pytest.mark.parametrize("name", FORMATS)
def test_products_have_the_bits_of_plain_ones(name: str, shape: str) -> None:
    from gemray_kernels.triton import exact_products
    from gemray_kernels.triton.exact_packed import TiledExactProduct

    found = layer(name, {**SHAPES, **CUT}[shape])
    leaves = found.tiled.leaves
    if found.tiled.code != "nvfp4":
        assert torch.equal(found.numbers_OI, found.unpacked_OI)
    else:  # whose scale of scales goes into the finished number
        assert (found.numbers_OI - found.unpacked_OI).abs().max() <= found.unpacked_OI.abs().max() / 128
    product = TiledExactProduct(found.tiled)
    x_TI = random_rows(max(ROWS), found.tiled.num_in, seed=1)
    whole_TO = exact_products.linear(x_TI, found.numbers_OI, leaves)
    wide_TO = tree_sum(exact_products.wide_summands(x_TI, found.numbers_OI, leaves))
    gated_TI = exact_products.gelu_linear(x_TI, found.numbers_OI, leaves)
    for rows in ROWS:
        x = x_TI[:rows]
        with poisoned_memory():
            assert torch.equal(product.linear(x), whole_TO[:rows]), rows
            assert torch.equal(tree_sum(product.wide_summands(x)), wide_TO[:rows]), rows
            assert torch.equal(tree_sum(product.summands(x, 128)).bfloat16(), whole_TO[:rows, 128:]), rows
            assert torch.equal(product.gelu(x), gated_TI[:rows]), rows
    for row in (0, 63, 299):
        assert torch.equal(product.linear(x_TI[row : row + 1])[0], whole_TO[row]), row


def test_blocks_of_fp8_whose_scales_are_parts_have_the_bits_of_plain_ones() -> None:
    """As checkpoints with scales in bfloat16 have them: numbers of prompts are made in registers, too."""
    from gemray_kernels.triton import exact_products
    from gemray_kernels.triton.exact_packed import TiledExactProduct
    from gemray_kernels.triton.factor_parts import with_parts

    found = layer(replace(FORMATS["fp8 block 128"], scale_dtype=torch.bfloat16), SHAPES["31B qkv"])
    assert with_parts(found.tiled).parts == 1
    product = TiledExactProduct(found.tiled)
    x_TI = random_rows(300, found.tiled.num_in, seed=5)
    whole_TO = exact_products.linear(x_TI, found.numbers_OI, 1)
    for rows in (1, 64, 65, 300):
        assert torch.equal(product.linear(x_TI[:rows]), whole_TO[:rows]), rows


@pytest.mark.parametrize("parts", [2, 3])
def test_numbers_of_nvfp4_are_the_same_in_long_and_short_parts(parts: int) -> None:
    """A weight of one scale of scales, as published, whose factor has either."""
    from gemray_kernels.triton import exact_products, factor_parts
    from gemray_kernels.triton.exact_packed import TiledExactProduct
    from gemray_kernels.triton.packed_dequantize import dequantized

    found = layer("nvfp4", SHAPES["31B o"])
    tiled = replace(found.tiled, factor_O=torch.full_like(found.tiled.factor_O, 0.0421))
    none = (tiled.factor_O[:1], tiled.factor_O[:1], torch.zeros(1, dtype=torch.bool))
    with mock.patch.object(factor_parts, "short_parts_of", return_value=none) if parts == 2 else nullcontext():
        assert factor_parts.with_parts(tiled).parts == parts
        product = TiledExactProduct(tiled)
    x_TI = random_rows(300, found.tiled.num_in, seed=6)
    whole_TO = exact_products.linear(x_TI, dequantized(tiled), NUM_SHARDS)
    for rows in (1, 8, 9, 64, 65, 300):
        assert torch.equal(product.linear(x_TI[:rows]), whole_TO[:rows]), rows


@pytest.mark.parametrize("width", [704, 1024])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_have_the_bits_of_plain_ones(name: str, width: int) -> None:
    """26B-A4B's width, whose leaves cut groups, and one whose leaves do not."""
    from gemray_kernels.triton import exact_experts
    from gemray_kernels.triton.exact_packed_experts import TiledExactExperts

    gate_up, down = (layer(name, shape, NUM_EXPERTS) for shape in ((2 * width, 2816, 1), (2816, width, NUM_SHARDS)))
    experts = TiledExactExperts(gate_up.tiled, down.tiled)
    x_TH = random_rows(400, 2816, seed=2)
    chosen_TK = torch.rand(400, NUM_EXPERTS, device="cuda").argsort(dim=1)[:, :TOP_K].contiguous()
    numbers = (gate_up.numbers_OI, down.numbers_OI)
    whole_TKH = exact_experts.expert_outputs(x_TH, chosen_TK, *numbers, NUM_SHARDS)
    wide_TKH = exact_experts.expert_subtrees(x_TH, chosen_TK, *numbers, NUM_SHARDS)
    for rows in (1, 5, 16, 17, 40, 256, 257, 400):
        with poisoned_memory():
            assert torch.equal(experts.outputs(x_TH[:rows], chosen_TK[:rows]), whole_TKH[:rows]), rows
            assert torch.equal(experts.subtrees(x_TH[:rows], chosen_TK[:rows]), wide_TKH[:rows]), rows


@pytest.mark.parametrize("name", EXPERTS)
def test_a_graph_holds_products_and_no_launch_waits(name: str) -> None:
    from gemray_kernels.triton.exact_packed import TiledExactProduct

    products = [TiledExactProduct(layer(name, shape).tiled) for shape in (SHAPES["31B o"], CUT["26B-A4B down"])]
    inputs = [[random_rows(rows, num_in, seed=rows) for rows in (1, 16, 64, 300)] for num_in in (8192, 2112)]

    def everything() -> list[Tensor]:
        pairs = zip(products, inputs, strict=True)
        return [y for product, xs in pairs for x in xs for y in (product.linear(x), product.summands(x))]

    found = captured_and_eager(everything)
    assert all(torch.equal(a, b) for a, b in found)


def test_products_of_fast_numerics_would_show() -> None:
    from gemray_kernels.triton import exact_products
    from gemray_kernels.triton.packed_products import TiledProduct

    found = layer("int4 group 32", SHAPES["31B o"])
    fast = random_packed(FORMATS["int4 group 32"], 5376, 8192, device="cuda", seed=5376)
    assert fast.tiling is not None
    x_TI = random_rows(300, 8192, seed=4)
    whole_TO = exact_products.linear(x_TI, found.numbers_OI, NUM_SHARDS)
    product = TiledProduct(laid_out(fast, fast.tiling))
    assert not torch.equal(product.linear(x_TI[:8]), whole_TO[:8])
