"""Benchmarks on GPUs: every batch gives a row with the device's own time, over any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemray_cluster.bench.processes import RankProcesses
from gemray_cluster.bench.report import Row
from gemray_cluster.bench.settings import Setup
from gemray_workers.embedded import embedded_path
from support.engine.gpu import needs_gpus

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("placement", ["colocated", "dedicated"])
@pytest.mark.parametrize("tp", [1, 2])
def test_profiled_batches(tp: int, placement: str, tmp_path: Path) -> None:
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
            "profile": True,
        },
        "this test",
    )
    needs_gpus(setup.gang_size)
    with RankProcesses(tmp_path) as ranks:
        rows = [row for row in ranks.run(setup) if isinstance(row, Row)]
    assert [row.batch for row in rows] == [1, 2]
    for row in rows:
        assert row.busy_ms is not None
        assert row.busy_ms > 0
        summary = (tmp_path / f"profile-embedded-batch{row.batch}.txt").read_text().split("\n\n")[0]
        assert ("collectives a cycle" in summary) == (setup.gang_size > 1)
        assert "device in one cycle: 1\n" in summary
