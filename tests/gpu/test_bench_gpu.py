"""Benchmarks on GPUs: a row for each batch with the device's own time, for prompts, and for rates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from gemray_cluster.bench.kv_memory import with_kv_memory
from gemray_cluster.bench.load import Load
from gemray_cluster.bench.processes import RankProcesses
from gemray_cluster.bench.report import PrefillRow, RateRow, Row
from gemray_cluster.bench.settings import Setup
from gemray_workers.embedded import embedded_path
from support.engine.gpu import needs_gpus, shortened

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize(
    ("tp", "placement"),
    [
        (1, "colocated"),
        *(
            pytest.param(tp, placement, marks=pytest.mark.cards(tp + (placement == "dedicated")))
            for tp, placement in ((1, "dedicated"), (2, "colocated"), (2, "dedicated"))
        ),
    ],
)
def test_profiled_batches(
    tp: int, placement: str, tmp_path: Path, cards_alone: Callable[[int], AbstractContextManager[None]]
) -> None:
    setup = Setup.of(
        {
            "name": "embedded",
            "model": str(embedded_path("gemray-tiny")),
            "drafter": str(embedded_path("gemray-tiny-dflash")),
            "drafter_placement": placement,
            "tp": tp,
            "batch": [1, 2],
            "prompt_len": 32,
            "steps": 4,
            "lag": 0,
            "profile": True,
        },
        "this test",
    )
    needs_gpus(setup.gang_size)
    with cards_alone(setup.gang_size) if setup.gang_size > 1 else nullcontext(), RankProcesses(tmp_path) as ranks:
        rows = [part.row for part in ranks.run(with_kv_memory(setup)) if isinstance(part.row, Row)]
    assert [row.batch for row in rows] == [1, 2]
    for row in rows:
        assert row.busy_ms is not None
        assert row.busy_ms > 0
        summary = (tmp_path / f"profile-embedded-batch{row.batch}-greedy-lag0.txt").read_text().split("\n\n")[0]
        assert ("collectives a cycle" in summary) == (setup.gang_size > 1)
        assert summary.endswith("beside its results: 0")


def test_experts_gaps_prompts_and_rates(tmp_path: Path) -> None:
    """What is measured with events, in cycles that run kernel by kernel, and through all captured graphs."""
    needs_gpus(1)
    directory = shortened("26B-A4B-it", tmp_path)
    lengths = {"prompt": [{"tokens": 40, "share": 1}], "output": [{"tokens": 6, "share": 1}]}
    load = Load.of(
        {"rates": [20], "seconds": 1, "first_token_limit_ms": 1e6, "between_tokens_limit_ms": 1e6, **lengths}, "here"
    )
    setup = Setup.of(
        {
            "name": "experts",
            "model": str(directory),
            "random_weights": True,
            "batch": [1, 4],
            "sampling": ["greedy", "published"],
            "lag": [1, 0],
            "prefill": [96],
            "prompt_len": 32,
            "steps": 6,
            "load": load,
        },
        "this test",
    )
    with RankProcesses(tmp_path) as ranks:
        probes, load_part, *parts = ranks.run(with_kv_memory(setup))
    assert (probes.spent.what, load_part.spent.what) == ("probes", "load")
    assert load_part.spent.graphs > 0
    assert load_part.spent.seconds >= load_part.spent.capturing_s + load_part.spent.compiling_s > 0
    found = [part.row for part in parts]
    assert len(found) == len(setup.work) == 10
    rows, (prompt, rate) = found[:8], found[8:]
    for row in rows:
        assert isinstance(row, Row)
        assert 0 <= row.gap.median < row.step.median
        assert row.experts is not None
        assert 8 <= row.experts.least <= row.experts.mean <= row.experts.most <= 128
    assert isinstance(prompt, PrefillRow)
    assert prompt.floor.sustained_rate is not None
    assert min(prompt.floor.matrix_rate, prompt.floor.sustained_rate) > 1e13
    assert isinstance(rate, RateRow)
    assert (rate.refused, rate.good_share) == (0, 1.0)
