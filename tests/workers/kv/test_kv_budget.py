from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray_workers.errors import CapacityError, InvalidField
from gemray_workers.kv.block_table import most_pages, pages_for
from gemray_workers.kv.budget import PoolPlan, fit_pools
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.scheduling.page_ledger import PageLedger

MIB = 1 << 20


def groups(page_size: int = 16, window: int = 1024) -> list[KVGroupSpec]:
    """The groups of the 12B, bf16, one rank."""
    return [
        KVGroupSpec("sliding", tuple(range(40)), 8, 256, page_size, window, torch.bfloat16),
        KVGroupSpec("full", tuple(range(40, 48)), 1, 512, page_size, None, torch.bfloat16),
    ]


def fit(specs: list[KVGroupSpec], mib: float, **changes: Any) -> PoolPlan:
    load = {"requested_len": 32768, "max_num_seqs": 32, "max_step_tokens": 512, "num_draft_tokens": 0} | changes
    return fit_pools(specs, kv_memory_bytes=int(mib * MIB), **load)


def test_plenty_of_memory_gives_no_more_than_the_sequences_can_use() -> None:
    plan = fit(groups(), 1 << 20, max_num_seqs=4)
    assert plan.max_model_len == 32768
    assert plan.num_windows == 4
    assert plan.num_pages["full"] == 4 * 2048
    assert plan.num_pages["sliding"] == 4 * (64 + 2) + 32
    assert plan.num_bytes < 4 * 1024 * MIB


def test_short_sequences_need_no_whole_window() -> None:
    plan = fit(groups(), 1 << 20, max_num_seqs=4, requested_len=100)
    assert plan.num_pages == {"sliding": 4 * 7, "full": 4 * 7}


def test_short_budget_keeps_the_requested_length_and_gives_up_windows() -> None:
    """One sequence of 32k needs 512 MiB of full pages; each window beside it 330 MiB."""
    plan = fit(groups(), 2048)
    assert plan.max_model_len == 32768
    assert 1 < plan.num_windows < 32
    assert plan.num_pages["full"] >= 2048


def test_shorter_budget_gives_up_length() -> None:
    plan = fit(groups(), 700)
    assert plan.num_windows == 1
    assert 8192 < plan.max_model_len < 32768
    assert fit(groups(), 700, requested_len=4096).max_model_len == 4096


def test_a_share_that_holds_no_sequence_is_taken_as_all() -> None:
    """Two tokens take 11 MiB, null pages included: less than a tenth of 700, and more than a hundredth."""
    whole, tenth, hundredth = (fit(groups(), 700, longest_share=share) for share in (1.0, 0.1, 0.01))
    assert tenth.max_model_len < whole.max_model_len
    assert hundredth == whole


def test_too_small_says_wanted_and_available() -> None:
    with pytest.raises(CapacityError, match=r"needs 10\.50 MiB, 5\.00 MiB are available \(32768 tokens would need"):
        fit(groups(), 5)


def test_a_length_that_allows_no_request() -> None:
    with pytest.raises(InvalidField, match="max_model_len = 1"):
        fit(groups(), 1000, requested_len=1)


@given(
    pages=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    window=st.integers(1, 40),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    requested_len=st.integers(2, 400),
    max_num_seqs=st.integers(1, 12),
    spare_rows=st.integers(0, 60),
    num_draft_tokens=st.integers(0, 5),
    kib=st.integers(0, 400),
)
@settings(max_examples=300)
def test_properties(
    pages: tuple[int, int],
    window: int,
    heads: tuple[int, int],
    requested_len: int,
    max_num_seqs: int,
    spare_rows: int,
    num_draft_tokens: int,
    kib: int,
) -> None:
    specs = [
        KVGroupSpec("sliding", (0, 1), heads[0], 8, pages[0], window, torch.float32),
        KVGroupSpec("full", (2,), heads[1], 16, pages[1], None, torch.float32),
    ]
    max_step_tokens = max_num_seqs * (1 + num_draft_tokens) + spare_rows

    def planned(length: int, num_bytes: int) -> PoolPlan:
        return fit_pools(
            specs,
            kv_memory_bytes=num_bytes,
            requested_len=length,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            num_draft_tokens=num_draft_tokens,
        )

    def alone(length: int) -> dict[str, int]:
        return {spec.name: most_pages(length, spec.page_size, spec.window, max_step_tokens) for spec in specs}

    def bytes_of(num_pages: dict[str, int]) -> int:
        return sum((num_pages[spec.name] + 1) * spec.page_bytes for spec in specs)

    memory = kib * 1024
    if bytes_of(alone(2)) > memory:
        with pytest.raises(CapacityError):
            planned(requested_len, memory)
        return
    plan = planned(requested_len, memory)
    assert plan.num_bytes == bytes_of(plan.num_pages) <= memory
    assert 2 <= plan.max_model_len <= requested_len
    for spec in specs:
        assert alone(plan.max_model_len)[spec.name] <= plan.num_pages[spec.name], "one sequence alone must fit"
        assert plan.num_pages[spec.name] <= max_num_seqs * pages_for(plan.max_model_len, spec.page_size)
    if plan.max_model_len < requested_len:
        assert bytes_of(alone(plan.max_model_len + 1)) > memory, "a longer sequence would have fitted"
    assert planned(requested_len, memory + 1024).max_model_len >= plan.max_model_len
    PageLedger(specs, plan.num_pages).check([])


@given(st.data())
@settings(max_examples=200)
def test_sliding_pool_lasts_for_any_step(data: st.DataObject) -> None:
    """With memory for all, no deal of a step's rows makes the sliding pages run out, with a step in flight or none."""
    page_size, window = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 20))
    max_num_seqs, num_draft_tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3))
    max_step_tokens = max_num_seqs * (1 + num_draft_tokens) + data.draw(st.integers(0, 30))
    lag = data.draw(st.integers(0, 1))
    specs = [
        KVGroupSpec("sliding", (0,), 1, 8, page_size, window, torch.float32),
        KVGroupSpec("full", (1,), 1, 8, 4, None, torch.float32),
    ]
    plan = fit_pools(
        specs,
        kv_memory_bytes=1 << 30,
        requested_len=1000,
        max_num_seqs=max_num_seqs,
        max_step_tokens=max_step_tokens,
        num_draft_tokens=num_draft_tokens,
        lag=lag,
    )
    ledger, computed = PageLedger(specs, plan.num_pages), [0] * max_num_seqs
    in_flight: list[list[int]] = []
    for slot in range(max_num_seqs):
        ledger.open(slot)
    for _ in range(12):
        budget, rows = max_step_tokens, []
        for _slot in range(max_num_seqs):
            rows.append(data.draw(st.integers(0, budget)))
            budget -= rows[-1]
        in_flight.append(rows)
        for slot in range(max_num_seqs):
            end = computed[slot] + sum(step[slot] for step in in_flight)
            assert ledger.grow(slot, end) == end
        if len(in_flight) <= lag:
            continue
        for slot, num_rows in enumerate(in_flight.pop(0)):
            rejected = data.draw(st.integers(0, min(num_draft_tokens, num_rows)))
            computed[slot] += num_rows - rejected
            ledger.release_out_of_window(slot, computed[slot])


def groups_31b() -> list[KVGroupSpec]:
    """The groups of the 31B, bf16, one rank: a window costs as much as ten windows' worth of full pages."""
    return [
        KVGroupSpec("sliding", tuple(range(50)), 16, 256, 16, 1024, torch.bfloat16),
        KVGroupSpec("full", tuple(range(50, 60)), 4, 512, 16, None, torch.bfloat16),
    ]


def test_a_length_nobody_asked_for_leaves_room_for_other_requests() -> None:
    """On 16 GiB the longest sequence alone would leave one window; half of the memory leaves several."""
    alone = fit(groups_31b(), 16 * 1024, requested_len=262_144)
    shared = fit(groups_31b(), 16 * 1024, requested_len=262_144, longest_share=0.5)
    assert alone.num_windows == 1
    assert shared.num_windows > 4
    assert 0.4 * alone.max_model_len < shared.max_model_len < 0.6 * alone.max_model_len
    assert shared.num_bytes <= 16 * 1024 * MIB


def test_more_memory_never_holds_fewer_requests() -> None:
    """Requests of four windows' tokens: how many the pools hold at one time."""
    held = []
    for mib in range(2_500, 40_000, 1_500):
        plan = fit(groups_31b(), mib, requested_len=8192)
        held.append(min(plan.num_windows, plan.num_pages["full"] // pages_for(4 * 1024, 16)))
    assert held == sorted(held)
    assert held[0] >= 1
    assert held[-1] > 10
