"""What products do before they wait for the kernel before them, as compiled for Hopper, which do not ask for weights
ahead: nothing, and most packed ones start when it has ended. All let the next kernel start early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.numerics import NUM_SHARDS
from gemray_kernels.packed_tiles import UNITS, TiledWeight
from gemray_kernels.packed_weight import CodeName, Scaling
from gemray_kernels.triton import exact_linear, exact_packed_linear, exact_products, linear, packed_linear
from gemray_kernels.triton.exact_packed import TiledExactProduct
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.linear_tiles import gated_tile, tile_of_summands
from gemray_kernels.triton.packed_tile_choice import gated_tile as packed_gated_tile
from gemray_kernels.triton.packed_tile_choice import tile_of_summands as packed_tile_of_summands
from support.kernels.triton_compile import Compiled, compile_launches

WAIT = "griddepcontrol.wait"
LET = "griddepcontrol.launch_dependents"
ASKS = "cp.async.bulk.prefetch"
READS = ("ld.global", "cp.async.cg")
NUM_OUT, NUM_IN = 16384, 512


def plain() -> list[Compiled]:
    """A product whose parts are added up later, and a gated one."""
    x_TI = torch.empty(1, NUM_IN, dtype=torch.bfloat16)
    weight_OI = torch.empty(NUM_OUT, NUM_IN, dtype=torch.bfloat16)
    summing, gated = tile_of_summands(1, NUM_OUT, NUM_IN), gated_tile(1, NUM_OUT)
    with mock.patch.object(linear, "starts_early", return_value=True):
        return [
            *compile_launches(lambda: linear.linear_in_tiles(x_TI, weight_OI, summing, out_dtype=torch.float32)),
            *compile_launches(lambda: linear.gated_linear_in_tiles(x_TI, weight_OI, gated, Gate.GELU)),
        ]


def plain_exact() -> list[Compiled]:
    """Such products in exact numerics: of one leaf, and of eight."""
    x_TI = torch.empty(1, NUM_IN, dtype=torch.bfloat16)
    weight_OI = torch.empty(NUM_OUT, NUM_IN, dtype=torch.bfloat16)
    with (
        mock.patch.object(exact_linear, "starts_early", return_value=True),
        mock.patch.object(linear, "starts_early", return_value=True),
    ):
        return [
            *compile_launches(lambda: exact_products.summands(x_TI, weight_OI, 1)),
            *compile_launches(lambda: exact_products.summands(x_TI, weight_OI, NUM_SHARDS)),
            *compile_launches(lambda: exact_products.gelu_linear(x_TI, weight_OI, 1)),
        ]


def packed_weight(code: CodeName) -> TiledWeight:
    unit = UNITS[code]
    units = NUM_IN // unit.inputs
    scales = {"int4": torch.int64, "nvfp4": torch.int32}
    return TiledWeight(
        code=code,
        scaling=Scaling.CODES if code in scales else Scaling.ROW,
        words_BOC=torch.empty(units, NUM_OUT, unit.words, dtype=torch.int16),
        scale_BO=torch.empty(units, NUM_OUT, dtype=scales.get(code, torch.float32)),
        factor_O=torch.empty(NUM_OUT),
        num_in=NUM_IN,
    )


def exact(code: CodeName) -> list[Compiled]:
    """Products of such a weight in exact numerics."""
    x_TI, product = torch.empty(1, NUM_IN, dtype=torch.bfloat16), TiledExactProduct(packed_weight(code))
    return [*compile_launches(lambda: product.summands(x_TI)), *compile_launches(lambda: product.gelu(x_TI))]


def packed(code: CodeName, *, early: bool | None = None) -> list[Compiled]:
    """Products of such a weight in fast numerics; `early` in the place of what tiles say."""
    weight = packed_weight(code)
    x_TI = torch.empty(1, NUM_IN, dtype=torch.bfloat16)
    summing, gated = packed_tile_of_summands(weight, NUM_OUT, 1), packed_gated_tile(weight, 1)
    if early is not None:
        summing, gated = replace(summing, early=early), replace(gated, early=early)
    with mock.patch.object(packed_linear, "starts_early", return_value=True):
        return [
            *compile_launches(
                lambda: packed_linear.packed_linear_in_tiles(x_TI, weight, summing, out_dtype=torch.float32)
            ),
            *compile_launches(lambda: packed_linear.packed_gated_linear_in_tiles(x_TI, weight, gated, Gate.GELU)),
        ]


@pytest.mark.parametrize("products", [plain, plain_exact])
def test_plain_products_in_tiles_ask_for_nothing_before_they_wait(products: Callable[[], list[Compiled]]) -> None:
    for product in products():
        before, after = product.ptx.split(WAIT)
        assert not [word for word in (ASKS, *READS) if word in before]
        assert LET in after
        assert ASKS not in after


@pytest.mark.parametrize("code", ["int4", "fp8"])
def test_packed_products_start_late_and_gated_ones_early(code: CodeName) -> None:
    summing, gated = packed(code)
    assert WAIT not in summing.ptx
    assert gated.ptx.count(WAIT) == 1
    for product in (summing, gated):
        check_that_the_next_kernel_starts_early(product)


@pytest.mark.parametrize("code", ["int4", "fp8"])
def test_exact_packed_products_start_late(code: CodeName) -> None:
    with mock.patch.object(exact_packed_linear, "starts_early", return_value=True):
        for product in exact(code):
            assert WAIT not in product.ptx
            check_that_the_next_kernel_starts_early(product)


def check_that_the_next_kernel_starts_early(product: Compiled) -> None:
    """Whether it may once this one has waited, where it waits, and before it reads anything."""
    assert product.ptx.count(LET) == 1
    reads = min(product.ptx.index(word) for word in READS if word in product.ptx)
    assert product.ptx.find(WAIT) < product.ptx.index(LET) < reads
    assert ASKS not in product.ptx


@pytest.mark.parametrize("code", ["int4", "fp8"])
def test_cards_without_early_starts_are_asked_for_none(code: CodeName) -> None:
    for product in exact(code):
        assert WAIT not in product.ptx
        assert LET not in product.ptx


def test_a_tile_may_let_packed_products_start_early() -> None:
    """As benchmarks have it that compare both."""
    for product in packed("fp8", early=True):
        assert product.ptx.count(WAIT) == product.ptx.count(LET) == 1
