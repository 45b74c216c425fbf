"""The reference of paged attention against attention written one score at a time."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from gemray_kernels.reference.kv_write import write_kv
from gemray_kernels.reference.paged_attention import paged_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 8, 4


class Case:
    """Random queries of several sequences and their keys, in pages of shuffled order; other pages hold NaN."""

    def __init__(self, lengths: list[tuple[int, int]], dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        """`lengths`: (rows, keys) of each sequence."""
        generator = torch.Generator().manual_seed(seed)
        pages_each = max(-(-keys // PAGE_SIZE) for _, keys in lengths) + 1
        num_pages = 1 + pages_each * len(lengths)
        order = torch.randperm(num_pages - 1, generator=generator) + 1
        self.table_SP = order.view(len(lengths), pages_each).to(torch.int32)
        shape = (num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.k_pages = torch.full(shape, torch.nan, dtype=dtype)
        self.v_pages = torch.full(shape, torch.nan, dtype=dtype)
        self.k, self.v = [], []
        for (_, keys), table_P in zip(lengths, self.table_SP.long(), strict=True):
            k, v = (torch.randn(keys, NUM_KV_HEADS, HEAD_DIM, generator=generator).to(dtype) for _ in range(2))
            at = torch.arange(keys)
            write_kv(k, v, self.k_pages, self.v_pages, table_P[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE)
            self.k.append(k)
            self.v.append(v)
        rows = [rows for rows, _ in lengths]
        self.q_TND = torch.randn(sum(rows), NUM_HEADS, HEAD_DIM, generator=generator).to(dtype)
        self.query_start_Z = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
        self.kv_len_S = torch.tensor([keys for _, keys in lengths], dtype=torch.int32)

    def forget_before(self, sequence: int, position: int) -> None:
        """As a pool does behind a window: drop the pages that lie wholly before `position`."""
        for page in range(position // PAGE_SIZE):
            number = int(self.table_SP[sequence, page])
            self.k_pages[number] = self.v_pages[number] = torch.nan
            self.table_SP[sequence, page] = 0

    def run(self, *, window: int | None = None, causal: bool = True, scale: float = 1.0) -> Tensor:
        return paged_attention(
            self.q_TND,
            self.k_pages,
            self.v_pages,
            self.table_SP,
            self.query_start_Z,
            self.kv_len_S,
            window=window,
            causal=causal,
            scale=scale,
        )

    def expected(self, *, window: int | None = None, causal: bool = True, scale: float = 1.0) -> Tensor:
        out = torch.zeros_like(self.q_TND, dtype=torch.float64)
        for s, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            first, end = int(self.query_start_Z[s]), int(self.query_start_Z[s + 1])
            for row in range(first, end):
                position = len(k) - (end - first) + (row - first)
                seen = [
                    j
                    for j in range(len(k))
                    if (not causal or j <= position) and (window is None or j > position - window)
                ]
                for head in range(NUM_HEADS):
                    kv_head = head * NUM_KV_HEADS // NUM_HEADS
                    weights = [
                        math.exp(float(self.q_TND[row, head].double() @ k[j, kv_head].double()) * scale) for j in seen
                    ]
                    for j, weight in zip(seen, weights, strict=True):
                        out[row, head] += weight / sum(weights) * v[j, kv_head]
        return out


RAGGED = [(1, 1), (5, 5), (1, 19), (7, 13), (3, 8), (1, 4)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 8, 64])
def test_every_row_sees_its_keys(window: int | None, causal: bool) -> None:
    case = Case(RAGGED)
    found = case.run(window=window, causal=causal, scale=0.7)
    torch.testing.assert_close(found, case.expected(window=window, causal=causal, scale=0.7), rtol=0, atol=1e-12)


def test_the_window_counts_the_query_itself() -> None:
    """A key that decides everything is seen from W - 1 positions away, not from W."""
    window = 5
    for distance, seen in ((window - 1, True), (window, False)):
        case = Case([(1, 12)])
        position = 11 - distance
        slot = int(case.table_SP[0, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE
        case.q_TND[:] = 1.0
        case.k_pages.view(-1, NUM_KV_HEADS, HEAD_DIM)[slot] = 100.0
        case.v_pages.view(-1, NUM_KV_HEADS, HEAD_DIM)[slot] = 7.0
        assert bool((case.run(window=window) == 7.0).all()) is seen


def test_pages_before_the_window_are_never_read() -> None:
    window = 5
    case = Case([(1, 19), (4, 17), (2, 30)])
    expected = case.expected(window=window)
    for sequence, rows in enumerate((1, 4, 2)):
        oldest = int(case.kv_len_S[sequence]) - rows - window + 1
        case.forget_before(sequence, oldest)
    assert (case.table_SP == 0).sum() > 6
    torch.testing.assert_close(case.run(window=window), expected, rtol=0, atol=1e-12)


def test_keys_after_the_length_are_never_read() -> None:
    case = Case([(3, 9)])
    case.kv_len_S[0] = 7
    case.k, case.v = [case.k[0][:7]], [case.v[0][:7]]
    case.k_pages[int(case.table_SP[0, 2])] = torch.nan
    torch.testing.assert_close(case.run(), case.expected(), rtol=0, atol=1e-12)


def test_rows_without_keys_and_sequences_without_rows() -> None:
    case = Case([(2, 2), (1, 6), (3, 3)])
    case.query_start_Z = torch.tensor([0, 2, 2, 6], dtype=torch.int32)  # two rows, none, four
    case.kv_len_S = torch.tensor([0, 6, 3], dtype=torch.int32)
    found = case.run()
    assert not found[:2].any(), "no keys at all"
    assert not found[2].any(), "four rows end at key 2: the first stands before key 0"
    assert found[3:].abs().min() > 0
    assert not found.isnan().any()


def test_a_nan_in_the_cache_is_not_hidden() -> None:
    case = Case([(1, 4)])
    case.v_pages[int(case.table_SP[0, 0]), 1] = torch.nan
    assert case.run().isnan().any()


def test_bfloat16_scores_are_not_rounded() -> None:
    """Scores near 100 lie 0.5 apart in bfloat16; rounded, the softmax would be another."""
    case = Case([(4, 16)], dtype=torch.bfloat16)
    case.q_TND *= 12
    found = case.run()
    assert found.dtype == torch.bfloat16
    assert (found - case.expected()).abs().max() < 0.02


def test_more_keys_than_announced_are_refused_where_rows_are_many() -> None:
    """Kernels for prompts would skip them."""
    for rows, refused in ((40, True), (5, False)):
        case = Case([(rows, 50)])
        batch = (case.q_TND, case.k_pages, case.v_pages, case.table_SP, case.query_start_Z, case.kv_len_S)
        with pytest.raises(ValueError, match="50 keys; at most 49") if refused else nullcontext():
            paged_attention(*batch, window=None, causal=True, scale=1.0, most_keys=49)
        paged_attention(*batch, window=None, causal=True, scale=1.0, most_keys=50)


def test_rows_that_write_nothing_go_to_the_null_page() -> None:
    pages = torch.zeros(3, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    rows = torch.ones(3, NUM_KV_HEADS, HEAD_DIM)
    k_pages, v_pages = pages.clone(), pages.clone()
    write_kv(rows, 2 * rows, k_pages, v_pages, torch.tensor([1, 2 * PAGE_SIZE + 3, 0]))
    assert k_pages[1].sum() == 0
    assert (k_pages[2, 3] == 1).all()
    assert (v_pages[2, 3] == 2).all()
    assert k_pages[2, :3].sum() == 0
