"""Exact attention on CUDA: right, and the same to the bit however a row is computed, at the published heads."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from support.kernels.exact_parity import ExactCase
from support.kernels.kernel_parity import AttentionCase

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
LENGTHS = {
    "decode": [(1, 1), (1, 17), (1, 4000), (1, 513), (1, 1024)],
    "verify": [(5, 700), (17, 2049), (16, 16), (1, 130), (9, 3000)],
    "mixed": [(300, 1500), (1, 600), (5, 90), (33, 33), (64, 1100), (32, 640)],
    "rounds": [(40, 9000), (1, 8200)],
}
HEADS = {
    "31B sliding": (32, 16, 256, 1024),
    "31B full": (32, 4, 512, None),
    "26B-A4B full": (16, 2, 512, None),
    "12B full": (16, 1, 512, None),
    "E2B sliding": (8, 1, 256, 512),
    "E4B full": (8, 2, 512, None),
}
EVERY_KIND = ((1, 2, 7, 23, 56), (127, 128, 129), (31, 63, 300), (299, 300, 333))
"""Calls of 1, 5, 16, 33 and more rows, with borders beside those of tiles."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("heads", HEADS)
def test_it_is_attention(heads: str, lengths: str, dtype: torch.dtype) -> None:
    from gemray_kernels.triton.exact_attention import exact_paged_attention

    num_heads, kv_heads, head_dim, window = HEADS[heads]
    for page_size, partial_bytes in ((16, 1 << 29), (32, 0)):
        case = AttentionCase(LENGTHS[lengths], num_heads, kv_heads, head_dim, page_size, window)
        kernel = partial(exact_paged_attention, partial_bytes=partial_bytes)
        assert case.error(kernel, dtype, "cuda", seed=len(lengths)) < TOLERANCE[dtype]


@pytest.mark.parametrize("heads", ["31B sliding", "31B full"])
def test_8_bit_pages_are_scaled(heads: str) -> None:
    from gemray_kernels.triton.exact_attention import exact_paged_attention

    num_heads, kv_heads, head_dim, window = HEADS[heads]
    case = AttentionCase(LENGTHS["mixed"], num_heads, kv_heads, head_dim, window=window)
    assert case.fp8_error(exact_paged_attention, torch.bfloat16, "cuda", 2) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16 pages", "8-bit pages"])
@pytest.mark.parametrize("heads", HEADS)
def test_a_row_has_the_same_bits_in_every_call(heads: str, fp8: bool) -> None:
    """All programs of some heads in one test: workers would compile them beside each other."""
    from gemray_kernels.triton.exact_attention import exact_paged_attention

    num_heads, kv_heads, head_dim, window = HEADS[heads]
    for keys, gain in itertools.product((360, 2200), (1.5, 20.0)):
        case = ExactCase(350, keys, num_heads, kv_heads, head_dim, 16, window, gain, fp8, EVERY_KIND)
        assert not list(case.differences(exact_paged_attention, torch.bfloat16, "cuda", 5))


@pytest.mark.parametrize("heads", ["31B full", "31B sliding"])
def test_a_row_has_the_same_bits_from_every_program(heads: str) -> None:
    from gemray_kernels.triton.exact_attention import exact_paged_attention
    from gemray_kernels.triton.paged_attention import Tile

    num_heads, kv_heads, head_dim, window = HEADS[heads]
    case = ExactCase(40, 900, num_heads, kv_heads, head_dim, window=window, cuts=((1, 6, 22),))
    tiles = [Tile(16, 32, 4, 2), Tile(16, 64, 8, 2), Tile(32, 32, 8, 2), Tile(64, 32, 8, 2)]
    for tile in tiles:
        for partial_bytes in (0, 1 << 29):
            number = 0

            def in_turn(
                *arguments: Any, tile: Tile = tile, partial_bytes: int = partial_bytes, **options: Any
            ) -> torch.Tensor:
                """The chosen programs in every other call."""
                nonlocal number
                number += 1
                if number % 2:
                    return exact_paged_attention(*arguments, **options)
                return exact_paged_attention(*arguments, **options, tile=tile, partial_bytes=partial_bytes)

            assert not list(case.differences(in_turn, torch.bfloat16, "cuda", 5))


def test_rows_behind_many_keys() -> None:
    """Chunks of every size, and several rounds of a prompt's kernels."""
    from gemray_kernels.triton.exact_attention import exact_paged_attention

    case = ExactCase(80, 70_000, 8, 1, 512, cuts=((1, 6, 22, 55),))
    assert not list(case.differences(exact_paged_attention, torch.bfloat16, "cuda", 5))


def test_float32_has_the_same_bits_in_every_call() -> None:
    from gemray_kernels.triton.exact_attention import exact_paged_attention

    for window in (None, 100):
        case = ExactCase(70, 300, 8, 2, 64, window=window, cuts=((1, 2, 7), (33,)))
        assert not list(case.differences(exact_paged_attention, torch.float32, "cuda", 5))


def test_fast_attention_is_seen_to_differ() -> None:
    from gemray_kernels.triton.paged_attention import paged_attention

    case = ExactCase(40, 900, 32, 4, 512, cuts=((1, 6),))
    assert list(case.differences(paged_attention, torch.bfloat16, "cuda", 5))


def test_a_power_of_two_behind_another_shift_is_the_same() -> None:
    """What exact attention asks of the device's 2^x: the fraction alone makes the digits, for every fraction."""
    from support.kernels.device_powers import BLOCK, device_powers

    fractions = -torch.arange(BLOCK, device="cuda") / 1024
    x = fractions - torch.arange(126, device="cuda").unsqueeze(1)
    found = device_powers(x)
    powers = torch.exp2(-torch.arange(126.0, dtype=torch.float64)).float().cuda().unsqueeze(1)
    assert torch.equal(found, found[0] * powers)
