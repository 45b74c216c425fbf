"""An MTP assistant has no KV of its own: what it costs in pages is room for drafts in the target's windows, no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemray_workers.rank.blueprint import Blueprint
from support.engine.engine_runner import engine_config

CONFIGS = Path(__file__).resolve().parents[4] / "benchmarks" / "configs"
TARGETS = ("E2B-it", "E4B-it", "12B-it", "26B-A4B-it", "31B-it")
GIB = 1 << 30
PAGE_SIZE = 16
NUM_SEQS = 8
NUM_DRAFTS = 4
STEP_ROWS = 512


def pair(name: str, kv_memory_bytes: int, max_model_len: int | None) -> tuple[Blueprint, Blueprint]:
    """With the assistant, and without."""
    with_assistant, without = (
        Blueprint.of(
            engine_config(
                CONFIGS / name,
                drafter_path=path,
                dtype="bfloat16",
                kv_memory_bytes=kv_memory_bytes,
                max_model_len=max_model_len,
                max_num_seqs=NUM_SEQS,
                max_step_tokens=STEP_ROWS,
                page_size=PAGE_SIZE,
                num_draft_tokens=NUM_DRAFTS if path else None,
                random_weights=True,
            )
        )
        for path in (str(CONFIGS / f"{name}-assistant"), None)
    )
    return with_assistant, without


@pytest.mark.parametrize("name", TARGETS)
def test_it_adds_no_group(name: str) -> None:
    with_assistant, without = pair(name, 16 * GIB, 8192)
    assert with_assistant.drafter.kv_specs == ()
    assert with_assistant.specs == with_assistant.target_specs == without.specs


@pytest.mark.parametrize("name", TARGETS)
def test_where_memory_does_not_bind_it_adds_the_pages_of_its_drafts_to_each_window(name: str) -> None:
    with_assistant, without = pair(name, 256 * GIB, 8192)
    more_bytes = 0
    for spec in without.specs:
        more_pages = 0
        if spec.window is not None:
            each = ceil_div(spec.window + NUM_DRAFTS, PAGE_SIZE) - ceil_div(spec.window, PAGE_SIZE)
            assert each == 1, "4 drafts behind a window of whole pages"
            more_pages = NUM_SEQS * each
        assert with_assistant.pools.num_pages[spec.name] == without.pools.num_pages[spec.name] + more_pages
        more_bytes += more_pages * spec.page_bytes
    assert with_assistant.pools.num_bytes == without.pools.num_bytes + more_bytes


@pytest.mark.parametrize("name", TARGETS)
def test_where_memory_binds_the_bytes_are_the_same(name: str) -> None:
    """Within a page of the full groups: what is given to drafts is taken from there."""
    budget = GIB // 2 if name.startswith("E") else 2 * GIB
    with_assistant, without = pair(name, budget, None)
    page = sum(spec.page_bytes for spec in without.specs if spec.window is None)
    for blueprint in (with_assistant, without):
        assert budget - page < blueprint.pools.num_bytes <= budget


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
