"""KV memory in `gemray bench`: found for all rows of a setup, refused where it is too small; and rows that fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gemray_cluster.bench import run
from gemray_cluster.bench.kv_memory import MOST_FOR_LOAD, with_kv_memory
from gemray_cluster.bench.run import run_offline
from gemray_cluster.bench.settings import Setup
from gemray_cluster.bench.suites import read_suite
from gemray_workers.errors import InvalidField
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.kv_demand import holds
from support.checkpoints.tiny import tiny_checkpoint

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def setup(**changes: Any) -> Setup:
    usual = {
        "name": "s",
        "model": str(tiny_checkpoint("31B")),
        "device": "cpu",
        "dtype": "float32",
        "random_weights": True,
        "page_size": 4,
        "batch": [1, 4, 2],
        "prefill": [9],
        "prompt_len": 12,
        "steps": 4,
        "prefills": 1,
    }
    return Setup.of({**usual, **changes}, "a test")


def test_every_batch_of_the_published_suites_fits() -> None:
    """12 GiB, which held 24 sequences of 31B, were what `kv_memory` used to be."""
    (found,) = (with_kv_memory(s) for s in read_suite(BENCHMARKS / "suites" / "exact.toml", {}, ["31B-none-fast"]))
    assert found.kv_memory is not None
    assert 12 << 30 < found.kv_memory < 20 << 30


def test_a_stated_size_stays_or_is_refused_with_what_it_takes() -> None:
    enough = with_kv_memory(setup()).kv_memory
    assert enough is not None
    assert with_kv_memory(setup(kv_memory=enough)).kv_memory == enough
    small = setup(kv_memory=1 << 16)
    with pytest.raises(
        InvalidField, match=r"kv_memory = '0.00 GiB' .*: unset, or .* GiB: setup s has batch 4, of up to"
    ):
        with_kv_memory(small)


def test_a_size_that_is_too_small_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "RankProcesses", None)
    with pytest.raises(InvalidField, match="kv_memory = "):
        run_offline([setup(), setup(kv_memory=1 << 16)], tmp_path, None, Console(quiet=True))


def test_a_load_may_wait_for_pages() -> None:
    rates = read_suite(BENCHMARKS / "suites" / "rates.toml", {}, ["31B-mtp"])
    assert [with_kv_memory(s).kv_memory for s in rates] == [MOST_FOR_LOAD]


def test_more_sequences_than_slots_are_refused() -> None:
    with pytest.raises(InvalidField, match="max_num_seqs = 3 is not allowed: unset, or at least 4, the largest batch"):
        setup(max_num_seqs=3)


def test_a_row_that_cannot_be_measured_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = setup()
    drawn = Blueprint.of(replace(pair.engine_config(), kv_memory_bytes=None))
    sizes = range(1 << 12, 1 << 20, 1 << 12)
    too_small = next(size for size in sizes if holds(drawn, size, num_seqs=2, length=pair.batch_len))
    monkeypatch.setattr(run, "with_kv_memory", lambda s: replace(s, kv_memory=too_small))
    with (tmp_path / "log").open("w") as log:
        report = run_offline([setup()], tmp_path, None, Console(file=log, width=200))
    (failure,) = report.failures
    assert (failure.name, failure.work) == ("s", ["batch 4, greedy, lag 1"])
    assert "no step decoded all 4 sequences together" in failure.reason
    assert [row.batch for row in report.rows] == [1, 2]
    assert [row.num_tokens for row in report.prefill] == [9]
    told = (tmp_path / "log").read_text().splitlines()
    assert told[1].startswith("s: batch 4, greedy, lag 1 failed: no step decoded all 4 sequences together | ")
    assert "Failed: s: batch 4, greedy, lag 1: no step" in (tmp_path / "bench.md").read_text()
