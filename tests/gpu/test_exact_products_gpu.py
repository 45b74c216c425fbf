"""Exact products on CUDA, at the shapes of the published models: a row's bits follow its own inputs alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemray_kernels.numerics import NUM_SHARDS, Numerics, leaves_of, tree_sum
from gemray_kernels.table import ExactProducts, kernels_for
from support.kernels.capture import captured_and_eager
from support.kernels.exact_rows import differing_ranks, differing_rows
from support.kernels.kernel_parity import poisoned_memory, relative_error

pytestmark = pytest.mark.gpu

SHAPES = {
    "31B qkv": (16384, 5376, None),
    "31B qkv full": (18432, 5376, None),
    "31B o": (5376, 8192, NUM_SHARDS),
    "31B o full": (5376, 16384, NUM_SHARDS),
    "31B gate_up": (43008, 5376, None),
    "31B down": (5376, 21504, NUM_SHARDS),
    "26B-A4B qkv": (8192, 2816, None),
    "26B-A4B o": (2816, 4096, NUM_SHARDS),
    "26B-A4B gate_up": (4224, 2816, None),
    "26B-A4B down": (2816, 2112, NUM_SHARDS),
    "26B-A4B router": (128, 2816, None),
    "E4B qkv": (3072, 2560, None),
    "E4B q": (2048, 2560, None),
    "E4B o": (2560, 2048, NUM_SHARDS),
    "E4B gate_up": (20480, 2560, None),
    "E4B down": (2560, 10240, NUM_SHARDS),
    "E4B layer gate": (256, 2560, None),
    "E4B layer projection": (2560, 256, None),
    "E2B qkv": (2560, 1536, None),
    "E2B down": (1536, 6144, NUM_SHARDS),
    "E2B gate_up": (12288, 1536, None),
    "gemray-tiny down": (256, 512, NUM_SHARDS),
}
"""Outputs, inputs and leaves of whole weights; None where `leaves_of` says how many."""
COUNTS = (1, 2, 5, 16, 17, 32, 40, 64, 65, 96, 128, 130, 200, 256, 500, 512, 1000, 1024, 2000)
ALONE = (1, 63, 64, 127, 500, 2047)
CUDA = torch.device("cuda")


def inputs_of(name: str, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, int]:
    """Rows, the weight, and its leaves."""
    num_out, num_in, leaves = SHAPES[name]
    generator = torch.Generator("cuda").manual_seed(num_out + num_in)
    x = torch.randn(rows, num_in, generator=generator, device=CUDA)
    # Magnitudes that differ between rows and inputs, as activations' do, show more of an order than even ones.
    x *= torch.randn(rows, num_in, generator=generator, device=CUDA).exp()
    weight = torch.randn(num_out, num_in, generator=generator, device=CUDA) * num_in**-0.5
    return x.to(dtype), weight.to(dtype), leaves_of(num_out, num_in) if leaves is None else leaves


def exact(dtype: torch.dtype) -> ExactProducts:
    products = kernels_for(CUDA, dtype, Numerics.EXACT).exact
    assert products is not None
    return products


@pytest.mark.parametrize("name", SHAPES)
def test_a_row_is_the_same_alone_and_among_others(name: str) -> None:
    x, weight, leaves = inputs_of(name, torch.bfloat16, 2048)
    with poisoned_memory():
        assert not differing_rows(exact(torch.bfloat16), x, weight, leaves, COUNTS, ALONE)


@pytest.mark.parametrize("name", SHAPES)
def test_ranks_together_have_the_bits_of_one(name: str) -> None:
    x, weight, leaves = inputs_of(name, torch.bfloat16, 600)
    with poisoned_memory():
        for rows in (1, 40, 600):
            assert not differing_ranks(exact(torch.bfloat16), x[:rows], weight, leaves), rows


@pytest.mark.parametrize("name", SHAPES)
def test_sums_are_as_good_as_float32_can(name: str) -> None:
    x, weight, leaves = inputs_of(name, torch.bfloat16, 300)
    expected = x.double() @ weight.double().t()
    for rows in (1, 33, 300):
        found = tree_sum(exact(torch.bfloat16).wide_summands(x[:rows], weight, leaves))
        assert found.dtype == torch.float32
        assert relative_error(found, expected[:rows]) < 1e-5, rows


@pytest.mark.parametrize("name", ["gemray-tiny down", "E4B layer gate", "26B-A4B router"])
def test_float32(name: str) -> None:
    x, weight, leaves = inputs_of(name, torch.float32, 130)
    products = exact(torch.float32)
    with poisoned_memory():
        assert not differing_rows(products, x, weight, leaves, (1, 16, 17, 64, 65), (1, 64, 129))
    assert not differing_ranks(products, x, weight, leaves)
    expected = x.double() @ weight.double().t()
    assert relative_error(tree_sum(products.wide_summands(x, weight, leaves)), expected) < 1e-6


def test_a_library_product_of_few_rows_would_show() -> None:
    x, weight, leaves = inputs_of("31B o", torch.bfloat16, 2048)
    library = replace(exact(torch.bfloat16), linear=lambda x, weight, _: torch.nn.functional.linear(x, weight))
    assert differing_rows(library, x, weight, leaves, (8, 64), ())


def test_splits_that_follow_the_rows_would_show() -> None:
    x, weight, leaves = inputs_of("31B o", torch.bfloat16, 128)
    products = exact(torch.bfloat16)

    def summands(x: Tensor, weight: Tensor, leaves: int) -> Tensor:
        return products.summands(x, weight, leaves if len(x) > 64 else leaves // 2)

    assert differing_rows(replace(products, summands=summands), x, weight, leaves, (8, 64), ())


@pytest.mark.parametrize("rows", [1, 64, 512])
def test_graphs_have_the_bits_of_eager_calls(rows: int) -> None:
    x, weight, leaves = inputs_of("31B o", torch.bfloat16, rows)
    products = exact(torch.bfloat16)
    for captured, eager in captured_and_eager(lambda: [products.linear(x, weight, leaves)]):
        assert torch.equal(captured, eager)
