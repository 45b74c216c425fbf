"""Parts of scales: every number of a code is rounded as by a product in float32 that is rounded to bfloat16."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gemray_kernels.packed_tiles import TiledWeight, laid_out
from gemray_kernels.packed_weight import CodeName
from gemray_kernels.triton import factor_parts
from gemray_kernels.triton.factor_parts import SHORT, parts_of, rounded_once, short_parts_of, values_of, with_parts
from support.kernels.packed_cases import FORMATS, random_packed

CODES: tuple[CodeName, ...] = ("int4", "int8", "fp8", "nvfp4")
OPEN = 1.2345679
"""A factor of more digits than bfloat16 holds."""


def tiled(name: str, num_in: int = 256, leaves: int = 1) -> TiledWeight:
    weight = random_packed(FORMATS[name], 24, num_in, device="cpu", leaves=leaves)
    assert weight.tiling is not None
    return laid_out(weight, weight.tiling)


def nearest(x: Fraction, around: float) -> float:
    """The bfloat16 number next to x, the even one of two, found among the neighbours of one that is near."""
    bits = torch.tensor(around).bfloat16().view(torch.int16).item()
    near = torch.arange(int(bits) - 2, int(bits) + 3, dtype=torch.int16)
    numbers = near.view(torch.bfloat16).tolist()
    return min(zip(numbers, near.tolist(), strict=True), key=lambda n: (abs(Fraction(n[0]) - x), n[1] & 1))[0]


def in_parts(value: float, high: float, low: float) -> float:
    """What two instructions give: a product rounded once, and a product and its sum with it, rounded once."""
    rest = nearest(Fraction(value) * Fraction(low), value * low) if low else 0.0
    return nearest(Fraction(value) * Fraction(high) + Fraction(rest), value * high + rest)


@pytest.mark.parametrize("code", CODES)
def test_parts_round_every_value_as_float32_does(code: CodeName) -> None:
    generator = torch.Generator().manual_seed(3)
    factor_N = 2.0**-9 * (0.5 + torch.rand(24, generator=generator))
    values_V = values_of(code)
    high_N, low_N, found_N = parts_of(factor_N, values_V)
    assert found_N.sum() >= 23, "a factor of int8 in a thousand has none"
    for factor, high, low in zip(factor_N[found_N], high_N[found_N].tolist(), low_N[found_N].tolist(), strict=True):
        wanted = (values_V * factor).bfloat16().tolist()
        assert [in_parts(value, high, low) for value in values_V.tolist()] == wanted


def test_short_parts_round_every_number_of_nvfp4_as_float32_does() -> None:
    """A scale's product with the high part is exact, that with the low one is rounded, as that with the value is."""
    factor_N = 2.0**-5 * (0.5 + torch.rand(200, generator=torch.Generator().manual_seed(5)))
    high_N, low_N, found_N = short_parts_of(factor_N)
    assert found_N.sum() >= 185, "three of a hundred factors have none"
    places = found_N.nonzero().flatten()[:5]
    scales_C = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    for factor, high, low in zip(factor_N[places], high_N[places].tolist(), low_N[places].tolist(), strict=True):
        for scale in scales_C.tolist():
            wanted = (torch.tensor(values) * scale * factor).bfloat16().tolist()
            scaled, rest = scale * high, nearest(Fraction(scale) * Fraction(low), scale * low)
            assert torch.tensor(scaled).bfloat16() == scaled
            assert [in_parts(value, scaled, rest) for value in values] == wanted


def test_parts_are_looked_for_until_all_are_found() -> None:
    """A start has hundreds of weights, and on a card each try waits for the one before."""
    with mock.patch.object(factor_parts, "rounded_once", wraps=rounded_once) as tries:
        assert short_parts_of(torch.tensor([0.0421, 0.1]))[2].all()
    assert tries.call_count < 10


def test_factors_out_of_range_have_no_short_parts() -> None:
    """Above 1 a kernel's scale times it would leave bfloat16's range."""
    _, _, found_N = short_parts_of(torch.tensor([2.5, -0.1, 2.0**-70, float("nan"), 0.1]))
    assert found_N.tolist() == [False, False, False, False, True]


def test_the_rest_of_a_factor_is_not_always_its_low_part() -> None:
    """So that trying what a part gives is needed."""
    factor_N = 1 + torch.arange(1, 4097) * 2.0**-13
    high_N, low_N, found_N = parts_of(factor_N, values_of("int8"))
    rest_N = (factor_N - high_N).bfloat16().float()
    assert (found_N & (low_N != rest_N)).sum() > 100
    assert (high_N.bfloat16().float() == high_N).all()
    assert (low_N.bfloat16().float() == low_N).all()


@given(st.floats(2.0**-100, 2.0**100), st.integers(-3, 3))
def test_float64_is_rounded_once(number: float, ulps: int) -> None:
    """Near the middle of two neighbours, too, where float32 in between would decide otherwise."""
    around = torch.tensor(number).bfloat16().double()
    middle = around * (1 + 2.0**-8) if ulps % 2 else around * (1 + 2.0**-9)
    x = middle + ulps * middle * 2.0**-52
    assert rounded_once(x.view(1)).item() == nearest(Fraction(x.item()), x.item())


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fp8 channel", 1),
        ("fp8 channel float32", 2),
        ("int8 channel", 1),
        ("int8 packed channel", 1),
        ("nvfp4", SHORT),
        ("nvfp4 modelopt", 2),
        ("int4 group 32", 0),
        ("fp8 block 128", 0),
    ],
)
def test_formats_have_parts(name: str, parts: int) -> None:
    found = with_parts(tiled(name))
    assert found.parts == parts
    assert (found.parts_O is None) == (parts == 0)


@pytest.mark.parametrize(("factor", "parts"), [(0.0421, SHORT), (0.0546875, 1), (0.038, 2)])
def test_weights_of_one_factor_of_nvfp4(factor: float, parts: int) -> None:
    """As published: one scale of scales a weight. A single part is as fast as short ones, and needs no search."""
    weight = tiled("nvfp4")
    assert with_parts(replace(weight, factor_O=torch.full_like(weight.factor_O, factor))).parts == parts


def test_scales_of_units_are_parts_where_bfloat16_holds_them() -> None:
    weight = tiled("fp8 block 128")
    short = replace(weight, scale_BO=weight.scale_BO.bfloat16().float())
    assert with_parts(short).parts == 1
    assert with_parts(replace(short, factor_O=short.factor_O * OPEN)).parts == 0
    assert with_parts(replace(short, scale_BO=short.scale_BO * 2.0**70)).parts == 0


def test_leaves_that_cut_groups_have_none() -> None:
    assert with_parts(tiled("nvfp4", num_in=8 * 24, leaves=8)).parts == 0


@pytest.mark.parametrize("factor", [2.0**7, 2.0**-70, -(2.0**7), float("inf"), float("nan")])
def test_factors_out_of_range_have_none(factor: float) -> None:
    weight = tiled("fp8 channel")
    factor_O: Tensor = weight.factor_O.clone()
    factor_O[3] = factor
    assert with_parts(replace(weight, factor_O=factor_O)).parts == 0
    factor_O[3] = factor * OPEN
    assert with_parts(replace(weight, factor_O=factor_O)).parts == 0


def test_a_factor_of_zero_has_parts() -> None:
    weight = tiled("fp8 channel")
    factor_O = weight.factor_O.clone()
    factor_O[3] = 0
    found = with_parts(replace(weight, factor_O=factor_O))
    assert found.parts_O is not None
    assert found.parts_O[3] == 0
