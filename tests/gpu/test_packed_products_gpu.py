"""Products with packed weights on CUDA against float64, at the shapes of the published models.

Inputs of a product are bfloat16 on both sides. A weight that is rounded to bfloat16 errs by at most 2^-9 of itself and
a rounded result likewise, each spread evenly: 2^-9 / sqrt(3) as a norm. Together that is 1.6e-3, and sums in float32
add nothing to be seen; gated products are rounded twice more.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from support.kernels.capture import captured_and_eager
from support.kernels.kernel_parity import poisoned_memory, relative_error
from support.kernels.packed_cases import EXPERTS, FORMATS, copied, random_packed

pytestmark = pytest.mark.gpu

TOLERANCE = 2.5e-3
GATED_TOLERANCE = 5e-3
EXPERTS_TOLERANCE = 6.5e-3
"""Error of gated experts added up in bfloat16: rounding alone gives 4.9e-3 on average in int4, whose numbers are
rounded, too, and up to 5.6e-3 of 60 rows (simulated); 4.0e-3 and up to 4.9e-3 in the others."""
SHAPES = {
    "31B qkv": (16384, 5376),
    "31B o": (5376, 8192),
    "26B-A4B down": (2816, 2112),
    "E2B down": (1536, 6144),
}
"""Outputs and inputs; of the third a part of a unit is left."""
ROWS = (1, 5, 16, 33, 64, 200, 512, 1100)
COLUMNS = ("int4 group 32", "nvfp4", "nvfp4 modelopt")
"""Formats with scales of codes, whose single rows have a kernel of their own."""
COLUMNS_TOLERANCE = 1e-6
"""Numbers are not rounded: what is left are sums in float32, 1e-7 as measured."""


def random_rows(rows: int, num_in: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, num_in, generator=generator, device="cuda").bfloat16()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_products(name: str, shape: str) -> None:
    from gemray_kernels.reference.packed_linear import dequantized
    from gemray_kernels.triton.packed_products import packed_product

    num_out, num_in = SHAPES[shape]
    weight = random_packed(FORMATS[name], num_out, num_in, device="cuda", seed=num_out)
    wide_OI = dequantized(copied(weight), torch.float64)
    product = packed_product(weight)
    alone = []
    for rows in ROWS:
        x_TI = random_rows(rows, num_in, seed=0)
        x_TI[0] = random_rows(1, num_in, seed=1)
        expected_TO = x_TI.double() @ wide_OI.T
        with poisoned_memory():
            found = {
                "linear": product.linear(x_TI),
                "summands": product.summands(x_TI).sum(0, dtype=torch.float64),
                "wide": product.wide_summands(x_TI).sum(0, dtype=torch.float64),
                "from 512 on": product.summands(x_TI, 512).sum(0, dtype=torch.float64),
            }
        assert relative_error(found.pop("from 512 on"), expected_TO[:, 512:]) < TOLERANCE, rows
        errors = {kind: relative_error(y_TO, expected_TO) for kind, y_TO in found.items()}
        assert all(error < TOLERANCE for error in errors.values()), (rows, errors)
        alone.append(product.summands(x_TI)[:, 0])
    beside = {rows: first_SO for rows, first_SO in zip(ROWS, alone, strict=True) if 1 < rows <= 64}
    for rows, first_SO in beside.items():
        assert torch.equal(first_SO, beside[5]), f"a row's bits depend on the other {rows - 1}"
    if name not in COLUMNS:
        assert torch.equal(alone[0], beside[5]), "a row's bits depend on whether it is alone"


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_in_every_tile(name: str) -> None:
    """Rows, outputs and units that tiles and parts do not divide; the same bits whenever it runs."""
    from gemray_kernels.packed_tiles import laid_out
    from gemray_kernels.reference.packed_linear import dequantized
    from gemray_kernels.triton.packed_prompts import packed_prompt_linear
    from gemray_kernels.triton.packed_tile_choice import PROMPT_TILES

    weight = random_packed(FORMATS[name], 2816, 2112, device="cuda")
    assert weight.tiling is not None
    wide_OI = dequantized(copied(weight), torch.float64)
    tiled = laid_out(weight, weight.tiling)
    for rows in (65, 1100):
        x_TI = random_rows(rows, 2112, seed=rows)
        expected_TO = x_TI.double() @ wide_OI.T
        for tile in PROMPT_TILES:
            for splits, dtype in ((1, torch.bfloat16), (1, torch.float32), (2, torch.float32), (3, torch.float32)):
                cut = replace(tile, splits=splits)
                with poisoned_memory():
                    found = [packed_prompt_linear(x_TI, tiled, cut, out_dtype=dtype) for _ in range(4)]
                assert relative_error(found[0].sum(0, dtype=torch.float64), expected_TO) < TOLERANCE, (rows, cut)
                assert all(torch.equal(again, found[0]) for again in found[1:]), (rows, cut)


VERIFIED = ("int4 group 32", "int8 channel", "fp8 channel", "nvfp4")
"""Formats with scales of rows or of codes."""


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("name", VERIFIED)
def test_verify_rows(name: str, size: int) -> None:
    """Right, the same whenever it runs, and with the bits of the tiles of few rows, whose parts these are; outputs,
    inputs and units that tiles and parts do not divide, and more tiles than programs."""
    from gemray_kernels.packed_tiles import laid_out
    from gemray_kernels.reference.activation import gelu_tanh_and_mul, silu_and_mul
    from gemray_kernels.reference.packed_linear import dequantized
    from gemray_kernels.triton.linear import Gate
    from gemray_kernels.triton.packed_linear import packed_gated_linear_in_tiles, packed_linear_in_tiles
    from gemray_kernels.triton.packed_tile_choice import gated_tile, tile_of_summands
    from gemray_kernels.triton.packed_verify import VerifyTile, packed_verify_gated_linear, packed_verify_linear

    for num_out, num_in in ((2832, 2112), (30000, 1056)):
        weight = random_packed(FORMATS[name], num_out, num_in, device="cuda")
        assert weight.tiling is not None
        wide_OI = dequantized(copied(weight), torch.float64)
        tiled = laid_out(weight, weight.tiling)
        for rows in (size // 2 + 1, size):
            x_TI = random_rows(rows, num_in, seed=rows)
            sums_TO = x_TI.double() @ wide_OI.T
            few = tile_of_summands(tiled, num_out, rows)
            for splits, first in ((few.splits, 0), (1, 0), (few.splits, 512)):
                wanted_STO = packed_linear_in_tiles(
                    x_TI, tiled, replace(few, splits=splits), out_dtype=torch.float32, first=first
                )
                for tile in (VerifyTile(3, size, splits), VerifyTile(4, size, splits)):
                    with poisoned_memory():
                        found = [
                            packed_verify_linear(x_TI, tiled, tile, out_dtype=torch.float32, first=first)
                            for _ in range(4)
                        ]
                    error = relative_error(found[0].sum(0, dtype=torch.float64), sums_TO[:, first:])
                    assert error < TOLERANCE, (rows, tile, first)
                    assert all(torch.equal(again, wanted_STO) for again in found), (rows, tile, first)
                    if splits == 1:
                        whole_STO = packed_verify_linear(x_TI, tiled, tile, out_dtype=torch.bfloat16, first=first)
                        assert torch.equal(whole_STO, wanted_STO.bfloat16()), (rows, tile, first)
            for gate, act in ((Gate.GELU, gelu_tanh_and_mul), (Gate.SILU, silu_and_mul)):
                wanted_TI = packed_gated_linear_in_tiles(x_TI, tiled, gated_tile(tiled, rows), gate)
                with poisoned_memory():
                    gated = [packed_verify_gated_linear(x_TI, tiled, VerifyTile(3, size), gate) for _ in range(4)]
                assert relative_error(gated[0], act(sums_TO)) < GATED_TOLERANCE, (rows, gate)
                assert all(torch.equal(again, wanted_TI) for again in gated), (rows, gate)


@pytest.mark.parametrize("shape", [(128, 2, 128, 0), (64, 3, 128, 32), (64, 2, 64, 16)])
@pytest.mark.parametrize("name", ["int4 group 32", "nvfp4", "fp8 channel"])
def test_even_shares(name: str, shape: tuple[int, int, int, int]) -> None:
    """Right, and a row's bits are the same whenever it runs, wherever it lies and whatever lies beside it; outputs,
    inputs and units that tiles and shares do not divide, fewer tiles than programs and more."""
    from gemray_kernels.packed_tiles import laid_out
    from gemray_kernels.reference.activation import gelu_tanh_and_mul, silu_and_mul
    from gemray_kernels.reference.packed_linear import dequantized
    from gemray_kernels.triton.linear import Gate
    from gemray_kernels.triton.packed_even import EvenTile, packed_even_gated_linear, packed_even_linear

    tile = EvenTile(*shape)
    most = tile.rows + tile.more
    for num_out, num_in in ((2832, 2112), (30000, 1056)):
        weight = random_packed(FORMATS[name], num_out, num_in, device="cuda")
        assert weight.tiling is not None
        wide_OI = dequantized(copied(weight), torch.float64)
        tiled = laid_out(weight, weight.tiling)
        x_TI = random_rows(most, num_in, seed=most)
        sums_TO = x_TI.double() @ wide_OI.T
        turned_TI = torch.cat([x_TI[-3:], random_rows(most - 8, num_in, seed=1), x_TI[:5]])
        for splits, shares, first in ((1, False, 0), (3, False, 0), (1, True, 0), (1, True, 512)):
            cut = replace(tile, splits=splits, shares=shares)
            dtype = torch.float32 if splits > 1 else torch.bfloat16
            product = partial(packed_even_linear, weight=tiled, tile=cut, out_dtype=dtype, first=first)
            with poisoned_memory():
                found, turned, fewer = product(x_TI), product(turned_TI), product(x_TI[:65])
                again = [product(x_TI) for _ in range(3)]
            error = relative_error(found.sum(0, dtype=torch.float64), sums_TO[:, first:])
            assert error < TOLERANCE, (num_out, cut, first)
            assert all(torch.equal(other, found) for other in again), (num_out, cut, first)
            assert torch.equal(turned[:, :3], found[:, -3:]), (num_out, cut, first)
            assert torch.equal(turned[:, -5:], found[:, :5]), (num_out, cut, first)
            assert torch.equal(fewer, found[:, :65]), (num_out, cut, first)
        gate, act = (Gate.SILU, silu_and_mul) if name == "nvfp4" else (Gate.GELU, gelu_tanh_and_mul)
        for cut in (tile, replace(tile, shares=True)):
            with poisoned_memory():
                gated = [packed_even_gated_linear(x_TI, tiled, cut, gate) for _ in range(4)]
                turned = packed_even_gated_linear(turned_TI, tiled, cut, gate)
            assert relative_error(gated[0], act(sums_TO)) < GATED_TOLERANCE, (num_out, cut, gate)
            assert all(torch.equal(again, gated[0]) for again in gated), (num_out, cut, gate)
            assert torch.equal(turned[:3], gated[0][-3:]), (num_out, cut, gate)
            assert torch.equal(turned[-5:], gated[0][:5]), (num_out, cut, gate)


@pytest.mark.parametrize("name", ["int4 group 32", "int8 channel", "fp8 channel", "nvfp4"])
def test_weights_ahead(name: str) -> None:
    """Right, the same whenever it runs, and with the bits of the tiles of few rows, whose parts these are; outputs,
    inputs and units that tiles and parts do not divide, and parts of fewer units than a ring has places."""
    from gemray_kernels.packed_tiles import laid_out
    from gemray_kernels.reference.activation import gelu_tanh_and_mul, silu_and_mul
    from gemray_kernels.reference.packed_linear import dequantized
    from gemray_kernels.triton.ahead_tile import ROOM_FOR_TWO, AheadTile
    from gemray_kernels.triton.linear import Gate
    from gemray_kernels.triton.packed_ahead import packed_gated_linear_ahead, packed_linear_ahead
    from gemray_kernels.triton.packed_linear import packed_gated_linear_in_tiles, packed_linear_in_tiles
    from gemray_kernels.triton.packed_tile_choice import gated_tile, tile_of_summands

    for num_out, num_in in ((2832, 2112), (30000, 1056), (5376, 8192)):
        weight = random_packed(FORMATS[name], num_out, num_in, device="cuda")
        assert weight.tiling is not None
        wide_OI = dequantized(copied(weight), torch.float64)
        tiled = laid_out(weight, weight.tiling)
        for rows in (1, 5, 8):
            x_TI = random_rows(rows, num_in, seed=rows)
            sums_TO = x_TI.double() @ wide_OI.T
            few = tile_of_summands(tiled, num_out, rows)
            for splits, first in ((few.splits, 0), (1, 0), (6, 512)):
                wanted_STO = packed_linear_in_tiles(
                    x_TI, tiled, replace(few, splits=splits), out_dtype=torch.float32, first=first
                )
                for tile in (
                    AheadTile(128, 4, splits, ROOM_FOR_TWO),
                    AheadTile(128, 4, splits),
                    AheadTile(64, 3, splits),
                    AheadTile(64, 4, splits),
                ):
                    with poisoned_memory():
                        found = [
                            packed_linear_ahead(x_TI, tiled, tile, out_dtype=torch.float32, first=first)
                            for _ in range(4)
                        ]
                    error = relative_error(found[0].sum(0, dtype=torch.float64), sums_TO[:, first:])
                    assert error < TOLERANCE, (rows, tile, first)
                    assert all(torch.equal(again, wanted_STO) for again in found), (rows, tile, first)
            for gate, act in ((Gate.GELU, gelu_tanh_and_mul), (Gate.SILU, silu_and_mul)):
                wanted_TI = packed_gated_linear_in_tiles(x_TI, tiled, gated_tile(tiled, rows), gate)
                with poisoned_memory():
                    gated = [packed_gated_linear_ahead(x_TI, tiled, AheadTile(64, 3), gate) for _ in range(4)]
                assert relative_error(gated[0], act(sums_TO)) < GATED_TOLERANCE, (rows, gate)
                assert all(torch.equal(again, wanted_TI) for again in gated), (rows, gate)


@pytest.mark.parametrize("name", COLUMNS)
def test_a_single_row_in_columns(name: str) -> None:
    """As near to the packed numbers as float32 sums are, the same whenever it runs, for small and large rows; outputs,
    inputs and units that tiles and parts do not divide, and parts of fewer units than a ring has places."""
    from gemray_kernels.packed_tiles import laid_out
    from gemray_kernels.reference.activation import gelu_tanh_and_mul, silu_and_mul
    from gemray_kernels.reference.packed_linear import dequantized
    from gemray_kernels.triton.ahead_tile import AheadTile
    from gemray_kernels.triton.linear import Gate
    from gemray_kernels.triton.packed_columns import packed_gated_linear_in_columns, packed_linear_in_columns

    for num_out, num_in in ((2832, 2112), (30000, 1056), (5376, 8192), (5376, 21504)):
        weight = random_packed(FORMATS[name], num_out, num_in, device="cuda")
        assert weight.tiling is not None
        wide_OI = dequantized(copied(weight), torch.float64)
        tiled = laid_out(weight, weight.tiling)
        for size in (2.0**-30, 1.0, 2.0**30):
            x_TI = random_rows(1, num_in, seed=num_in) * size
            sums_TO = x_TI.double() @ wide_OI.T
            for tile in (AheadTile(128, 3, 6, 96), AheadTile(128, 4, 1), AheadTile(64, 3, 2, 72), AheadTile(64, 4, 8)):
                for first in (0, 512):
                    with poisoned_memory():
                        found = [
                            packed_linear_in_columns(x_TI, tiled, tile, out_dtype=torch.float32, first=first)
                            for _ in range(4)
                        ]
                    error = relative_error(found[0].sum(0, dtype=torch.float64), sums_TO[:, first:])
                    assert error < COLUMNS_TOLERANCE, (size, tile, first)
                    assert all(torch.equal(again, found[0]) for again in found[1:]), (size, tile, first)
        x_TI = random_rows(1, num_in, seed=num_in)
        sums_TO = x_TI.double() @ wide_OI.T
        for gate, act in ((Gate.GELU, gelu_tanh_and_mul), (Gate.SILU, silu_and_mul)):
            for tile in (AheadTile(64, 3, 1, 72), AheadTile(64, 4, 1, 96)):
                with poisoned_memory():
                    gated = [packed_gated_linear_in_columns(x_TI, tiled, tile, gate) for _ in range(4)]
                assert relative_error(gated[0], act(sums_TO)) < GATED_TOLERANCE, (tile, gate)
                assert all(torch.equal(again, gated[0]) for again in gated[1:]), (tile, gate)


@pytest.mark.parametrize("name", ["int4 group 32", "nvfp4", "fp8 channel"])
def test_a_graph_holds_few_and_verify_rows(name: str) -> None:
    """31B's gate and up rows, and its down projection: what is captured is what runs, up to rows that share work."""
    from gemray_kernels.triton.packed_products import packed_product

    gate_up = packed_product(random_packed(FORMATS[name], 43008, 5376, device="cuda"))
    down = packed_product(random_packed(FORMATS[name], 5376, 21504, device="cuda"))
    inputs = [
        (random_rows(rows, 5376, seed=rows), random_rows(rows, 21504, seed=rows))
        for rows in (1, 8, 16, 24, 40, 64, 80, 160)
    ]

    def everything() -> list[torch.Tensor]:
        return [y for x_TH, x_TI in inputs for y in (gate_up.gelu(x_TH), down.summands(x_TI))]

    for found, wanted in captured_and_eager(everything):
        assert torch.equal(found, wanted), found.shape


def test_prompts_of_small_rows() -> None:
    """e4m3's numbers are 2^-120 of themselves: nearly all products with such rows are subnormal, and some sums are."""
    from gemray_kernels.packed_tiles import laid_out
    from gemray_kernels.reference.packed_linear import dequantized
    from gemray_kernels.triton.packed_prompts import packed_prompt_linear
    from gemray_kernels.triton.packed_tile_choice import PROMPT_TILES

    weight = random_packed(FORMATS["fp8 channel"], 2816, 2112, device="cuda")
    assert weight.tiling is not None
    wide_OI = dequantized(copied(weight), torch.float64)
    tiled = laid_out(weight, weight.tiling)
    for size in (2.0**-12, 2.0**-16):
        x_TI = random_rows(200, 2112, seed=3) * size
        expected_TO = x_TI.double() @ wide_OI.T
        for tile in PROMPT_TILES:
            found_STO = packed_prompt_linear(x_TI, tiled, tile, out_dtype=torch.bfloat16)
            assert relative_error(found_STO[0], expected_TO) < TOLERANCE, (size, tile)


@pytest.mark.parametrize("name", EXPERTS)
def test_gated_products(name: str) -> None:
    from gemray_kernels.reference.activation import gelu_tanh_and_mul, silu_and_mul
    from gemray_kernels.reference.packed_linear import dequantized
    from gemray_kernels.triton.packed_products import packed_product

    for num_out, num_in, kind in ((20480, 2560, "gelu"), (4224, 2816, "silu")):
        weight = random_packed(FORMATS[name], num_out, num_in, device="cuda", seed=num_in)
        wide_OI = dequantized(copied(weight), torch.float64)
        product = packed_product(weight)
        for rows in (1, 16, 64, 200, 512):
            x_TI = random_rows(rows, num_in, seed=rows)
            expected_TO = (gelu_tanh_and_mul if kind == "gelu" else silu_and_mul)(x_TI.double() @ wide_OI.T)
            with poisoned_memory():
                found_TO = product.gelu(x_TI) if kind == "gelu" else product.silu(x_TI)
            assert relative_error(found_TO, expected_TO) < GATED_TOLERANCE, rows


@pytest.mark.parametrize("name", ["int4 group 32", "nvfp4", "fp8 block 128"])
def test_parts_that_begin_inside_a_whole_weight(name: str) -> None:
    from gemray_kernels.reference.packed_linear import dequantized
    from gemray_kernels.triton.packed_products import packed_product

    for first, num_in in ((1056, 1056), (10752, 10752)):  # of 26B-A4B's and of 31B's MLP
        weight = random_packed(FORMATS[name], 2816, num_in, device="cuda", first=first)
        wide_OI = dequantized(copied(weight), torch.float64)
        product = packed_product(weight)
        x_TI = random_rows(8, num_in, seed=2)
        assert relative_error(product.linear(x_TI), x_TI.double() @ wide_OI.T) < TOLERANCE


@pytest.mark.parametrize("name", EXPERTS)
def test_a_graph_holds_products_and_no_launch_waits(name: str) -> None:
    from gemray_kernels.triton.packed_products import packed_product

    product = packed_product(random_packed(FORMATS[name], 4096, 2816, device="cuda"))
    inputs = [random_rows(rows, 2816, seed=rows) for rows in (1, 16, 64, 512)]

    def everything() -> list[torch.Tensor]:
        return [y for x in inputs for y in (product.linear(x), product.summands(x), product.gelu(x))]

    differing = {
        (place, tuple(found.shape)): float((found.double() - wanted.double()).abs().max())
        for place, (found, wanted) in enumerate(captured_and_eager(everything))
        if not torch.equal(found, wanted)
    }
    assert not differing


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name: str) -> None:
    """26B-A4B's, fewer of them."""
    from gemray_kernels.reference.experts import gated_experts
    from gemray_kernels.reference.packed_linear import dequantized
    from gemray_kernels.triton.packed_experts import packed_experts

    gate_up = random_packed(FORMATS[name], 1408, 2816, device="cuda", num_experts=12)
    down = random_packed(FORMATS[name], 2816, 704, device="cuda", seed=1, num_experts=12)
    wide = [dequantized(copied(weight), torch.float64) for weight in (gate_up, down)]
    experts = packed_experts(gate_up, down)
    for rows in (1, 5, 16, 40, 300):
        x_TH = random_rows(rows, 2816, seed=rows)
        generator = torch.Generator().manual_seed(rows)
        weights_TK = torch.rand(rows, 4, generator=generator).cuda()
        experts_TK = torch.stack([torch.randperm(12, generator=generator)[:4] for _ in range(rows)]).cuda()
        expected_TH = gated_experts(x_TH.double(), weights_TK.double(), experts_TK, *wide)
        with poisoned_memory():
            found_TH = experts.weighted_sum(x_TH, weights_TK, experts_TK)
        assert relative_error(found_TH, expected_TH) < EXPERTS_TOLERANCE, rows
