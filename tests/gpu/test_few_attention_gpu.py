"""Attention of few programs against its reference in float64, and what its early loads may not see."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.layer_norms import Norm
from support.engine.gpu import needs_gpus
from support.kernels.capture import captured_and_eager
from support.kernels.kernel_parity import AttentionCase, beside_others

pytestmark = pytest.mark.gpu

GROUPS = {"31B": (32, 16, 1024), "E4B": (8, 2, 512), "E2B": (8, 1, 512), "three heads a KV head": (6, 2, 256)}
LENGTHS = {
    "decode": [(1, 1), (1, 17), (1, 4000), (1, 513), (1, 1024), (1, 0)],
    "verify": [(5, 700), (17, 2049), (16, 16), (1, 130), (9, 3000), (0, 0), (3, 0), (7, 3), (32, 1060), (70, 0)],
}
EVERY = 1 << 30


def few(*arguments: Any, small_until: int = EVERY, **options: Any) -> Tensor:
    """Attention by this kernel however many programs it has, in small chunks of one row's keys up to so many."""
    from gemray_kernels.triton import few_attention, paged_attention

    with (
        mock.patch.object(few_attention, "VERY_FEW", small_until),
        mock.patch.object(few_attention, "MOST_PROGRAMS", {8: EVERY, 16: EVERY}),
        mock.patch.object(paged_attention, "short_programs", side_effect=AssertionError("another kernel serves")),
    ):
        return paged_attention.paged_attention(*arguments, **options)


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize(("lengths", "small_until"), [("decode", EVERY), ("decode", 0), ("verify", EVERY)])
@pytest.mark.parametrize("group", GROUPS)
def test_attention_equals_the_reference(group: str, lengths: str, small_until: int, page_size: int) -> None:
    """Where pages that no row sees, and what lies beside a sequence's keys in its own, hold NaN."""
    needs_gpus(1)
    heads, kv_heads, window = GROUPS[group]
    most_rows = max(rows for rows, keys in LENGTHS[lengths] if keys)
    kernel = partial(few, most_rows=most_rows, small_until=small_until)
    for shift in range(3):
        longer = [(rows, keys + 21 * shift if keys else 0) for rows, keys in LENGTHS[lengths]]
        case = AttentionCase(longer, heads, kv_heads, 256, page_size, window, scale=0.7)
        assert case.error(kernel, torch.bfloat16, "cuda", seed=shift) < 5e-3


def test_a_row_does_not_depend_on_what_others_hold() -> None:
    """The same bits beside any other sequences, in any place of a batch of this shape."""
    needs_gpus(1)
    for first, found in beside_others(partial(few, most_rows=5), "cuda"):
        assert torch.equal(found, first)


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("group", ["31B", "E2B"])
def test_a_captured_call_equals_an_eager_one(group: str, rows: int) -> None:
    """Without any patch: shapes that are served so."""
    from gemray_kernels.triton.paged_attention import paged_attention

    needs_gpus(1)
    heads, kv_heads, window = GROUPS[group]
    batch = AttentionCase([(rows, 640), (0, 0)], heads, kv_heads, 256, 16, window).batch(torch.bfloat16, "cuda", seed=7)
    options: dict[str, Any] = {"window": window, "causal": True, "scale": 1.0, "most_rows": rows}
    [(captured, eager)] = captured_and_eager(lambda: [paged_attention(*batch, **options)])
    assert torch.equal(captured, eager)
    assert torch.equal(eager, few(*batch, small_until=8, **options))


@pytest.mark.parametrize("last_alone", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 1500), (5, 5), (5, 641), (5, 66), (16, 1290)])
@pytest.mark.parametrize("group", ["31B", "E2B"])
def test_a_step_s_own_keys_are_read_when_they_are_written(group: str, rows: int, keys: int, last_alone: bool) -> None:
    """NaN lies there until the kernel before attention, which lets it start at once, has written them.

    Where the last row alone attends, keys of the others are older than its own; what picks that row out starts late.
    """
    from gemray_kernels.triton.attention_inputs import attention_inputs

    needs_gpus(1)
    heads, kv_heads, window = GROUPS[group]
    _, k_pages, v_pages, table_SP, start_Z, kv_len_S = AttentionCase(
        [(rows, keys), (0, 0)], heads, kv_heads, 256, 16, window
    ).batch(torch.bfloat16, "cuda", seed=3)
    places = torch.arange(keys - rows, keys, device="cuda")
    slots_T = table_SP[0].long()[places // 16] * 16 + places % 16
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    summands = random(1, rows, (heads + 2 * kv_heads) * 256)
    norm, cos_T1D, sin_T1D = Norm(random(256), 1e-6), random(rows, 1, 256), random(rows, 1, 256)
    write = KVWrite(norm, True, k_pages, v_pages, slots_T)
    most_rows, place_U = rows, torch.tensor([rows - 1], device="cuda")
    if last_alone:
        most_rows, start_Z = 1, start_Z.clamp(max=1)

    def step(*, waits: bool) -> Tensor:
        for pages in (k_pages, v_pages):
            pages.view(-1, kv_heads, 256).index_fill_(0, slots_T, torch.nan)
        q_TND = attention_inputs(summands, cos_T1D, sin_T1D, heads, norm, write)
        if last_alone:
            q_TND = q_TND[place_U]
        if waits:
            torch.cuda.synchronize()
        return few(
            q_TND, k_pages, v_pages, table_SP, start_Z, kv_len_S,
            window=window, causal=True, scale=0.0625, most_rows=most_rows,
        )  # fmt: skip

    expected = step(waits=True)
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [step(waits=False) for _ in range(8)]
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(one, expected) for one in found)
