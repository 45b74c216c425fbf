"""Attention with all keys of a sequence and KV head in one program, against its reference in float64."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from support.engine.gpu import needs_gpus
from support.kernels.capture import captured_and_eager
from support.kernels.kernel_parity import AttentionCase, beside_others

pytestmark = pytest.mark.gpu

GROUPS = {
    "31B": (32, 16, 256, 1024, True),
    "E2B": (8, 1, 256, 512, True),
    "no groups": (4, 4, 256, 128, True),
    "not causal": (16, 4, 256, 512, False),
    "31B DFlash": (64, 8, 128, 2048, True),
    "26B-A4B DFlash, not causal": (32, 8, 128, 2048, False),
    "small heads without groups": (4, 4, 128, 128, True),
}
"""Query heads, KV heads, head dim, window, whether keys behind a row are hidden."""
LENGTHS = {
    "decode": [(1, 1), (1, 17), (1, 4000), (1, 513), (1, 1024), (1, 0)],
    "verify": [(5, 700), (17, 2049), (16, 16), (1, 130), (9, 3000), (0, 0), (3, 0), (7, 3), (32, 1060)],
    "few rows, and blocks of them": [
        (1, 900),
        (32, 2000),
        (1, 64),
        (29, 700),
        (20, 11),
        (40, 0),
        (1, 1),
        (1, 65),
        (1, 128),
        (2, 1025),
    ],
}


def whole(*arguments: Any, multiprocessors: int = 132, **options: Any) -> Tensor:
    """Attention by this kernel however few programs it has, as on a device of so many multiprocessors."""
    from gemray_kernels.triton import paged_attention, whole_attention

    with (
        mock.patch.object(whole_attention, "LEAST_PROGRAMS", 1),
        mock.patch.object(whole_attention, "MULTIPROCESSORS", multiprocessors),
        mock.patch.object(paged_attention, "short_programs", side_effect=AssertionError("another kernel serves")),
    ):
        return paged_attention.paged_attention(*arguments, **options)


@pytest.mark.parametrize("multiprocessors", [132, 1])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("group", GROUPS)
def test_attention_equals_the_reference(group: str, lengths: str, multiprocessors: int) -> None:
    """Where pages that no row sees, and what lies beside a sequence's keys in its own, hold NaN."""
    needs_gpus(1)
    heads, kv_heads, head_dim, window, causal = GROUPS[group]
    most_rows = max(rows for rows, keys in LENGTHS[lengths] if keys)
    kernel = partial(whole, most_rows=most_rows, multiprocessors=multiprocessors)
    for head_start in range(3):
        longer = [(rows, keys + 21 * head_start if keys else 0) for rows, keys in LENGTHS[lengths]]
        case = AttentionCase(longer, heads, kv_heads, head_dim, 16, window, causal=causal, scale=0.7)
        assert case.error(kernel, torch.bfloat16, "cuda", seed=head_start) < 5e-3


def test_a_row_does_not_depend_on_what_others_hold() -> None:
    """The same bits beside any other sequences, in any place of a batch of this shape."""
    needs_gpus(1)
    for first, found in beside_others(partial(whole, most_rows=5), "cuda"):
        assert torch.equal(found, first)


@pytest.mark.parametrize("group", ["31B", "31B DFlash"])
def test_a_captured_call_equals_an_eager_one(group: str) -> None:
    needs_gpus(1)
    heads, kv_heads, head_dim, window, causal = GROUPS[group]
    case = AttentionCase([(5, 640)] * 8 + [(3, 0)], heads, kv_heads, head_dim, 16, window)
    batch = case.batch(torch.bfloat16, "cuda", seed=7)
    attend = partial(whole, *batch, window=window, causal=causal, scale=1.0, most_rows=5)
    [(captured, eager)] = captured_and_eager(lambda: [attend()])
    assert torch.equal(captured, eager)
