"""Products of few rows in fast numerics on CUDA, at the shapes of the published models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gemray_kernels.table import Kernels, triton_kernels
from gemray_kernels.triton.linear_tiles import ahead_tile, gated_ahead_tile, whole_tile
from support.kernels.kernel_parity import poisoned_memory, relative_error

pytestmark = pytest.mark.gpu

SHAPES = {
    "31B qkv full": (18432, 5376),
    "31B o": (5376, 8192),
    "31B down": (5376, 21504),
    "31B down of two ranks": (5376, 10752),
    "26B-A4B qkv": (8192, 2816),
    "26B-A4B o": (2816, 4096),
    "26B-A4B down": (2816, 2112),
    "E4B qkv": (3072, 2560),
    "E4B q": (2048, 2560),
    "E4B qkv full": (6144, 2560),
    "E4B o": (2560, 2048),
    "E4B down": (2560, 10240),
    "E4B layer gate": (256, 2560),
    "E2B qkv": (2560, 1536),
    "E2B o full": (1536, 4096),
    "E2B down wide": (1536, 12288),
    "31B's assistant, down": (1024, 8192),
}
GATED = {
    "31B": (43008, 5376),
    "26B-A4B": (4224, 2816),
    "E4B": (20480, 2560),
    "E2B": (12288, 1536),
    "E2B wide": (24576, 1536),
    "26B-A4B of two ranks": (2112, 2816),
}
COUNTS = (1, 8, 16, 17, 32, 33, 40, 41, 48, 63)
MORE_COUNTS = (65, 80, 81, 96)
"""Rows with which products of large weights alone are not the library's."""
ALONE = (0, 31, 63)


def rows_and_weight(num_out: int, num_in: int) -> tuple[Tensor, Tensor]:
    """96 rows, and the weight."""
    generator = torch.Generator("cuda").manual_seed(num_out + num_in)
    x = torch.randn(96, num_in, generator=generator, device="cuda")
    x *= torch.randn(96, num_in, generator=generator, device="cuda").exp()
    weight = torch.randn(num_out, num_in, generator=generator, device="cuda") * num_in**-0.5
    return x.bfloat16(), weight.bfloat16()


def products(kernels: Kernels, num_out: int, num_in: int) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Products that are not the library's, with their parts added up in order."""
    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "summands": lambda x, w: kernels.summands(x, w).float().sum(0),
        "wide": lambda x, w: kernels.wide_summands(x, w).sum(0),
    }
    if whole_tile(num_out) is not None:
        found["whole"] = kernels.linear
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_a_row_is_the_same_alone_and_among_others(name: str) -> None:
    all_rows, weight = rows_and_weight(*SHAPES[name])
    x = all_rows[:64]
    expected = x.double() @ weight.double().t()
    for product, call in products(triton_kernels(), *SHAPES[name]).items():
        with poisoned_memory():
            together = call(x, weight)
            assert relative_error(together, expected) < 4e-3, product
            for count in COUNTS:
                assert torch.equal(call(x[:count], weight), together[:count]), (product, count)
            for row in ALONE:
                assert torch.equal(call(x[row : row + 1], weight), together[row : row + 1]), (product, row)
            for count in MORE_COUNTS if product == "summands" and ahead_tile(96, *weight.shape) else ():
                more = call(all_rows[:count], weight)
                assert torch.equal(more[:64], together), count
                alone = [call(row, weight) for row in all_rows[64:count].split(1)]
                assert torch.equal(more[64:], torch.cat(alone)), count


@pytest.mark.parametrize("name", GATED)
def test_a_gated_row_is_the_same_alone_and_among_others(name: str) -> None:
    all_rows, weight = rows_and_weight(*GATED[name])
    x = all_rows[:64]
    kernels = triton_kernels()
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=1)
    with poisoned_memory():
        together = kernels.gelu_linear(x, weight)
        expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
        assert relative_error(together, expected) < 1e-2
        for count in COUNTS:
            assert torch.equal(kernels.gelu_linear(x[:count], weight), together[:count]), count
        for row in ALONE:
            assert torch.equal(kernels.gelu_linear(x[row : row + 1], weight), together[row : row + 1]), row
        for count in MORE_COUNTS if gated_ahead_tile(96, *weight.shape) else ():
            more = kernels.gelu_linear(all_rows[:count], weight)
            assert torch.equal(more[:64], together), count
            alone = [kernels.gelu_linear(row, weight) for row in all_rows[64:count].split(1)]
            assert torch.equal(more[64:], torch.cat(alone)), count
