"""Exact numerics of linear layers: the tree, and the reference, whose rows depend on nothing but themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemray_kernels.numerics import NUM_SHARDS, Numerics, leaves_of, tree_sum
from gemray_kernels.reference.activation import gelu_tanh
from gemray_kernels.reference.apart import apart
from gemray_kernels.reference.layer_norms import total
from gemray_kernels.table import EXACT_REFERENCE, REFERENCE, ExactProducts, kernels_for

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
RANKS = [2, 4, 8]


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def test_tree_adds_neighbours_first() -> None:
    parts = random(8, 100, seed=0, dtype=torch.float32)
    a, b, c, d, e, f, g, h = parts
    assert torch.equal(tree_sum(parts), ((a + b) + (c + d)) + ((e + f) + (g + h)))
    assert not torch.equal(tree_sum(parts), parts.sum(0)), "numbers that show the order"
    for ranks in RANKS:
        assert torch.equal(tree_sum(torch.stack([tree_sum(part) for part in parts.chunk(ranks)])), tree_sum(parts))


@pytest.mark.parametrize("count", [0, 3, 6])
def test_tree_refuses_other_numbers_of_parts(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} parts: a power of two is allowed"):
        tree_sum(torch.zeros(count, 2))


def test_total_is_the_tree_or_the_sum_in_order() -> None:
    parts = random(8, 100, seed=1, dtype=torch.float32)
    assert torch.equal(total(parts, torch.bfloat16), tree_sum(parts).bfloat16())
    assert torch.equal(total(parts[:3], torch.float32), parts[0] + parts[1] + parts[2])


def test_leaves_follow_the_whole_weight() -> None:
    published = {
        "31B query, key, value": (16384, 5376, 1),
        "31B gate, up": (43008, 5376, 1),
        "26B-A4B query, key, value": (8192, 2816, 1),
        "26B-A4B gate, up": (4224, 2816, 1),
        "26B-A4B router": (128, 2816, 8),
        "E4B query, key, value": (3072, 2560, 1),
        "E4B per-layer gate": (256, 2560, 8),
        "E4B per-layer projection": (2560, 256, 1),
        "head": (262144, 5376, 1),
        "inputs of odd length": (64, 3001, 1),
    }
    found = {name: leaves_of(num_out, num_in) for name, (num_out, num_in, _) in published.items()}
    assert found == {name: leaves for name, (*_, leaves) in published.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leaves", [1, 8])
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype, leaves: int) -> None:
    assert not differing_rows(EXACT_REFERENCE, dtype, leaves)


def test_a_library_product_would_show() -> None:
    library = replace(EXACT_REFERENCE, linear=lambda x_TI, weight_OI, _: REFERENCE.linear(x_TI, weight_OI))
    assert differing_rows(library, torch.float32, 1)


def differing_rows(products: ExactProducts, dtype: torch.dtype, leaves: int) -> list[tuple[str, int]]:
    """Products and numbers of rows for which some row is not what it is alone."""
    x, weight = random(130, 152, seed=2, dtype=dtype), random(90, 152, seed=3, dtype=dtype)
    parts, factor = random(2, 130, 152, seed=4, dtype=dtype), random(130, 152, seed=5, dtype=dtype)

    def results(rows: slice) -> dict[str, Tensor]:
        return {
            "linear": products.linear(x[rows], weight, leaves),
            "summands": products.summands(x[rows], weight, leaves).transpose(0, 1),
            "wide_summands": products.wide_summands(x[rows], weight, leaves).transpose(0, 1),
            "gelu_linear": products.gelu_linear(x[rows], weight, leaves),
            "silu_linear": products.silu_linear(x[rows], weight, leaves),
            "gated": products.gated_projection(parts[:, rows], factor[rows], weight, leaves).transpose(0, 1),
        }

    alone = [results(slice(row, row + 1)) for row in range(130)]
    differing = []
    for count in (2, 3, 7, 64, 65, 130):
        for name, found in results(slice(count)).items():
            if not torch.equal(found, torch.cat([row[name] for row in alone[:count]])):
                differing.append((name, count))
    return differing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_together_have_the_bits_of_one(dtype: torch.dtype, ranks: int) -> None:
    x, weight = random(5, 8 * 24, seed=6, dtype=dtype), random(8 * 20, 8 * 24, seed=7, dtype=dtype)
    whole = EXACT_REFERENCE.linear(x, weight, NUM_SHARDS)
    split = [
        tree_sum(EXACT_REFERENCE.wide_summands(x_part, weight_part, NUM_SHARDS // ranks))
        for x_part, weight_part in zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)
    ]
    assert torch.equal(tree_sum(torch.stack(split)).to(dtype), whole)
    outputs = [EXACT_REFERENCE.linear(x, part, 2) for part in weight.chunk(ranks)]
    assert torch.equal(torch.cat(outputs, 1), EXACT_REFERENCE.linear(x, weight, 2))
    gates = torch.stack([part.flatten(0, 1) for part in weight.view(2, ranks, -1, 8 * 24).unbind(1)])
    gated = [EXACT_REFERENCE.gelu_linear(x, part, 2) for part in gates]
    assert torch.equal(torch.cat(gated, 1), EXACT_REFERENCE.gelu_linear(x, weight, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reference_is_a_linear_layer(dtype: torch.dtype) -> None:
    x, weight = random(9, 88, seed=8, dtype=dtype), random(33, 88, seed=9, dtype=dtype)
    expected = x.double() @ weight.double().t()
    for leaves in (1, 2, 4, 8):
        parts = EXACT_REFERENCE.wide_summands(x, weight, leaves)
        assert torch.allclose(parts.double().sum(0), expected, rtol=0, atol=1e-13 if dtype == torch.float64 else 3e-5)


def test_bfloat16_is_rounded_once() -> None:
    x, weight = random(9, 512, seed=10, dtype=torch.bfloat16), random(33, 512, seed=11, dtype=torch.bfloat16)
    wide = EXACT_REFERENCE.wide_summands(x, weight, 4)
    assert wide.dtype == torch.float32
    assert torch.equal(EXACT_REFERENCE.linear(x, weight, 4), tree_sum(wide).bfloat16())


def test_elements_apart_do_not_depend_on_their_place() -> None:
    x = random(1000, seed=12, dtype=torch.float32)
    alone = torch.cat([gelu_tanh(element) for element in x.split(1)])
    assert torch.equal(gelu_tanh(apart(x)), alone)
    assert not torch.equal(gelu_tanh(x), alone), "numbers that show the difference"


@pytest.mark.parametrize("leaves", [3, 16, 8])
def test_leaves_that_do_not_fit_are_refused(leaves: int) -> None:
    with pytest.raises(ValueError, match=f"{leaves} leaves of 36 inputs: 1, 2, 4 or 8 that divide"):
        EXACT_REFERENCE.linear(torch.zeros(1, 36), torch.zeros(4, 36), leaves)


def test_table_has_exact_products_where_numerics_are_exact() -> None:
    assert kernels_for(CPU, torch.float32).exact is None
    assert kernels_for(CPU, torch.float32, Numerics.EXACT).exact is EXACT_REFERENCE
