"""KV memory of a known load: what is found holds it, and is not much more than that."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray_workers.kv.budget import pages_together
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.kv_demand import holds, kv_memory_for
from support.engine.engine_runner import engine_config
from support.engine.gpu import CONFIGS
from support.scheduling.scheduler_bench import MAX_LEN, SPECS, Bench

GIB = 1 << 30


@given(
    num_seqs=st.integers(1, 5),
    prompt_len=st.integers(1, 24),
    max_tokens=st.integers(36, 40),
    drafts=st.integers(0, 3),
    lag=st.integers(0, 1),
    prefill_chunk=st.integers(1, 32),
)
@settings(max_examples=60)
def test_a_scheduler_comes_to_run_them_all_at_one_time(
    num_seqs: int, prompt_len: int, max_tokens: int, drafts: int, lag: int, prefill_chunk: int
) -> None:
    load: dict[str, Any] = {"max_step_tokens": 32, "lag": lag}
    pages = pages_together(SPECS, length=prompt_len + max_tokens, num_seqs=num_seqs, num_draft_tokens=drafts, **load)
    # The pools also have to hold one sequence of the longest length.
    alone = pages_together(SPECS, length=MAX_LEN, num_seqs=1, num_draft_tokens=drafts, **load)
    pools = {name: max(pages[name], alone[name]) for name in pages}
    bench = Bench(pools, drafts, max_num_seqs=num_seqs, prefill_chunk=prefill_chunk, **load)
    for i in range(num_seqs):
        bench.submit(str(i), prompt_len, max_tokens)
    most = 0
    while bench.scheduler.has_work:
        decoding = [rows for rows in bench.step().scheduled if rows.num_known == 1]
        most = max(most, len(decoding))
    assert most == num_seqs
    assert bench.scheduler.stats(0.0).num_preemptions == 0


def blueprint(model: str, **changes: Any) -> Blueprint:
    steps = {"max_num_seqs": 32, "max_model_len": 8194, "max_step_tokens": 4096, "prefill_chunk": 4096, "lag": 1}
    usual = {"dtype": "bfloat16", "page_size": 16, "kv_memory_bytes": None, "poison_freed_pages": False}
    return Blueprint.of(engine_config(CONFIGS / model, **{**usual, **steps, **changes}))


@pytest.mark.parametrize(("num_seqs", "length"), [(32, 556), (8, 8194), (1, 556), (0, 0)])
@pytest.mark.parametrize(("model", "tp"), [("31B-it", 1), ("26B-A4B-it", 2), ("E2B-it", 1)])
def test_what_is_found_holds_the_load_and_less_does_not(model: str, tp: int, num_seqs: int, length: int) -> None:
    drawn = blueprint(model, tensor_parallel_size=tp)
    found = kv_memory_for(drawn, num_seqs=num_seqs, length=length)
    assert holds(drawn, found, num_seqs=num_seqs, length=length)
    assert not holds(drawn, found - (1 << 20), num_seqs=num_seqs, length=length)
    assert not holds(drawn, 1 << 20, num_seqs=num_seqs, length=length)


def test_a_batch_of_31b_beside_a_long_prompt() -> None:
    """32 sequences of 556 tokens are 560 in whole pages, of 880 KiB each."""
    drawn = blueprint("31B-it")
    batch = 32 * 560 * (880 << 10)
    found = kv_memory_for(drawn, num_seqs=32, length=556)
    assert batch < found < 1.2 * batch
    assert not holds(drawn, 12 * GIB, num_seqs=32, length=556)


def test_a_drafters_pages_are_among_them_or_on_a_card_of_their_own() -> None:
    drafter = {"drafter_path": str(CONFIGS / "31B-it-DFlash"), "random_weights": True}
    load = {"num_seqs": 32, "length": 556}
    alone, together = (kv_memory_for(blueprint("31B-it", **more), **load) for more in ({}, drafter))
    assert together > alone
    apart = blueprint("31B-it", **drafter, drafter_placement="dedicated")
    found = kv_memory_for(apart, **load)
    assert holds(apart, found, **load)
    assert found < together
