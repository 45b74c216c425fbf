"""The scheduler with a prefix cache: what it counts, and whom a hit lets start."""

from __future__ import annotations

import pytest

from gemray_workers.scheduling.page_ledger import PageLedger
from support.scheduling.fake_engine import oracle
from support.scheduling.scheduler_bench import MAX_LEN, PLENTY, SPECS, Bench

PAGE = 4
LEAST = {"sliding": 16, "full": MAX_LEN // PAGE}
"""Pages for one request of full length."""


def test_stats_tell_what_was_asked_for_and_found() -> None:
    bench = Bench(prefix_cache=True)
    for name, prompt_len in {"first": 20, "again": 20, "longer": 30}.items():
        bench.submit(name, prompt_len)
        bench.finish()
    stats = bench.scheduler.stats(0.0)
    assert stats.prefix_cache_queries == 20 + 20 + 30
    assert stats.prefix_cache_hits == 0 + 16 + 20, "whole pages, and never the last token"
    assert [bench.final(name).cached_tokens for name in ("first", "again", "longer")] == [0, 16, 20]
    assert stats.prefix_cache_evictions == 0
    assert stats.pages_in_use == {"sliding": 0, "full": 0}
    # 20 + 7 tokens of two answers, which part behind the prompt, and 30 + 7 that begin alike: the last token is chosen
    # and not computed.
    assert stats.pages_cached["full"] == 5 + 1 + 1 + (30 + 7) // PAGE - 5


def test_stats_count_the_pages_that_were_given_up() -> None:
    bench = Bench(LEAST, prefix_cache=True)
    bench.submit("first", 40, max_tokens=1)
    bench.finish()
    cached = bench.scheduler.stats(0.0).pages_cached
    assert cached["full"] == 10
    bench.submit("other", 40, max_tokens=1, prompt_ids=list(range(100, 140)))
    bench.finish()
    stats = bench.scheduler.stats(0.0)
    wanted = 2 * 10 - LEAST["full"]
    assert stats.prefix_cache_evictions >= wanted
    assert stats.pages_cached["full"] == LEAST["full"]


@pytest.mark.parametrize(("prefix_cache", "running"), [(True, ["a", "b"]), (False, ["a"])])
def test_a_request_starts_on_the_pages_that_it_finds(prefix_cache: bool, running: list[str]) -> None:
    """Six pages are free and its text takes ten, nine of which another holds."""
    bench = Bench(LEAST, prefix_cache=prefix_cache, admission_headroom=0)
    submits = [bench.submit("a", 40, max_tokens=8)]
    for _ in range(4):
        bench.step()
    submits.append(bench.submit("b", 40, max_tokens=4))
    bench.step()
    assert bench.running == running
    bench.finish()
    for submit in submits:
        assert bench.ids(submit.request_id) == oracle(submit, MAX_LEN)[0]


def test_what_others_hold_counts_although_all_of_them_are_too_few_for_the_oldest() -> None:
    """The first needs 10 of 18 pages and the second 5, and the long one wants 15. The last wants 5, of which the second
    holds 4: it starts on what is left, though the second was looked at as one who might give way."""
    bench = Bench({"sliding": 100, "full": 18}, prefix_cache=True, admission_headroom=0)
    submits = [bench.submit("first", 40, max_tokens=3, prompt_ids=list(range(100, 140)))]
    submits.append(bench.submit("long", 60, max_tokens=2, prompt_ids=list(range(200, 260))))
    submits.append(bench.submit("second", 16, max_tokens=8))
    while not bench.ids("second"):
        bench.step()
    assert bench.running == ["first", "second"]
    submits.append(bench.submit("last", 17, max_tokens=4))
    bench.step()
    assert bench.running == ["first", "second", "last"]
    bench.finish()
    for submit in submits:
        assert bench.ids(submit.request_id) == oracle(submit, MAX_LEN)[0]


def test_shared_pages_of_a_window_are_no_room_for_what_follows() -> None:
    """They are given back as the window slides, to one who holds them still; those of a full group stay."""
    ledger = PageLedger(SPECS, PLENTY, prefix_cache=True)
    ids = list(range(32))
    ledger.open(0)
    ledger.grow(0, 16)
    ledger.publish(0, ids, 16)
    hit = ledger.find(ids, "", 16)
    assert ledger.held_for_good(hit, ledger.leavers()) == {"sliding": 0, "full": 4}
    ledger.open(1, hit=hit)
    wanted = ledger.demand(32, 1)
    assert ledger.still_missing(1, 32, 1) == {"sliding": wanted["sliding"], "full": wanted["full"] - 4}
    ledger.close(0)
    assert ledger.still_missing(1, 32, 1) == {"sliding": wanted["sliding"] - 2, "full": wanted["full"] - 4}
