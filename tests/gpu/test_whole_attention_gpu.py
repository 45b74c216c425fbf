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
    "31B": (32, 16, 1024),
    "E2B": (8, 1, 512),
    "no groups": (4, 4, 128),
}
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


def whole(*arguments: Any, **options: Any) -> Tensor:
    """Attention by this kernel however few programs it has."""
    from gemray_kernels.triton import paged_attention, whole_attention

    with (
        mock.patch.object(whole_attention, "LEAST_PROGRAMS", 1),
        mock.patch.object(paged_attention, "short_programs", side_effect=AssertionError("another kernel serves")),
    ):
        return paged_attention.paged_attention(*arguments, **options)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("group", GROUPS)
def test_attention_equals_the_reference(group: str, lengths: str) -> None:
    """Where pages that no row sees, and what lies beside a sequence's keys in its own, hold NaN."""
    needs_gpus(1)
    heads, kv_heads, window = GROUPS[group]
    most_rows = max(rows for rows, keys in LENGTHS[lengths] if keys)
    kernel = partial(whole, most_rows=most_rows)
    for head_start in range(3):
        longer = [(rows, keys + 21 * head_start if keys else 0) for rows, keys in LENGTHS[lengths]]
        case = AttentionCase(longer, heads, kv_heads, 256, 16, window, scale=0.7)
        assert case.error(kernel, torch.bfloat16, "cuda", seed=head_start) < 5e-3


def test_a_row_does_not_depend_on_what_others_hold() -> None:
    """The same bits beside any other sequences, in any place of a batch of this shape."""
    needs_gpus(1)
    for first, found in beside_others(partial(whole, most_rows=5), "cuda"):
        assert torch.equal(found, first)


def test_a_captured_call_equals_an_eager_one() -> None:
    needs_gpus(1)
    case = AttentionCase([(5, 640)] * 8 + [(3, 0)], 32, 16, 256, 16, 1024)
    batch = case.batch(torch.bfloat16, "cuda", seed=7)
    attend = partial(whole, *batch, window=1024, causal=True, scale=1.0, most_rows=5)
    [(captured, eager)] = captured_and_eager(lambda: [attend()])
    assert torch.equal(captured, eager)
