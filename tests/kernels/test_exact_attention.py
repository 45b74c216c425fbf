"""The reference of exact attention: right, the same to the bit however rows are computed; and the check can fail."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gemray_kernels.reference import exact_paged_attention as exact
from gemray_kernels.reference.paged_attention import paged_attention
from support.kernels.exact_parity import CASES
from support.kernels.kernel_parity import AttentionCase

RAGGED = [(5, 5), (1, 190), (7, 130), (2, 0), (0, 6), (4, 3)]


@pytest.mark.parametrize("window", [None, 1, 5, 64, 100])
def test_it_is_attention(window: int | None) -> None:
    case = AttentionCase(RAGGED, 4, 2, 24, window=window)
    assert case.error(exact.exact_paged_attention, torch.float64, "cpu", 1) < 1e-14
    assert case.error(exact.exact_paged_attention, torch.float32, "cpu", 1) < 1e-6
    assert case.error(exact.exact_paged_attention, torch.bfloat16, "cpu", 1) < 2e-2


def test_8_bit_pages_are_scaled() -> None:
    assert AttentionCase(RAGGED, 4, 2, 24).fp8_error(exact.exact_paged_attention, torch.float32, "cpu", 1) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_in_every_call(name: str, dtype: torch.dtype) -> None:
    assert not list(CASES[name].differences(exact.exact_paged_attention, dtype, "cpu", 3))


def test_rows_that_are_attended_at_a_time_change_no_bit() -> None:
    batch = AttentionCase(RAGGED, 4, 2, 24).batch(torch.float32, "cpu", 1)
    found = []
    for rows in (1, 3, 100):
        with mock.patch.object(exact, "MOST_PRODUCTS", rows * 4 * 24 * exact.CHUNK):
            found.append(exact.exact_paged_attention(*batch, window=None, causal=True, scale=1.0))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", CASES)
def test_a_split_that_follows_the_number_of_rows_is_seen(name: str) -> None:
    def wrong(q_TND: Tensor, *arguments: Any, **options: Any) -> Tensor:
        with mock.patch.object(exact, "CHUNK", 16 + len(q_TND) % 16):
            return exact.exact_paged_attention(q_TND, *arguments, **options)

    assert list(CASES[name].differences(wrong, torch.float32, "cpu", 3))


def test_plain_attention_is_not_exact() -> None:
    case = CASES["every row alone"]
    assert any("cut" in difference for difference in case.differences(paged_attention, torch.float32, "cpu", 3))


def test_non_causal_attention_is_refused() -> None:
    case = AttentionCase([(3, 8)], 4, 2, 16, causal=False)
    with pytest.raises(ValueError, match="causal"):
        case.error(exact.exact_paged_attention, torch.float32, "cpu", 1)


def test_more_rows_than_announced_are_refused() -> None:
    batch = AttentionCase([(3, 8)], 4, 2, 16).batch(torch.float32, "cpu", 1)
    with pytest.raises(ValueError, match="3 rows; at most 2"):
        exact.exact_paged_attention(*batch, window=None, causal=True, scale=1.0, most_rows=2)
