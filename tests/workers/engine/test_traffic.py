"""Mixed traffic for a few seconds on CPU: the scenario that runs for minutes on GPUs."""

from __future__ import annotations

from functools import cache

import pytest

from gemray_workers.config import EngineConfig
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from support.checkpoints.tiny import VOCAB_SIZE, Shape
from support.engine.traffic import TrafficReport, catalogue, plain_answers, traffic
from support.engine.traffic_configs import CONFIGS, MAX_MODEL_LEN, traffic_config, traffic_faults
from support.processes.gang import RunOnGang
from support.waiting import HANG_S

SECONDS = 1.0


@cache
def known(shape: Shape = "31B") -> tuple[list[Submit], dict[str, list[int]]]:
    submits = catalogue(VOCAB_SIZE, MAX_MODEL_LEN, count=12, most_drafts=4, most_tokens=32, seed=5)
    name = next(name for name, served in CONFIGS.items() if served.shape == shape)
    return submits, plain_answers(traffic_config(name, "cpu"), submits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2-mtp", "dedicated"])
def test_nothing_changes_and_nothing_is_lost(run_on_gang: RunOnGang, name: str) -> None:
    config: EngineConfig = traffic_config(name, "cpu")
    reports = run_on_gang(config.gang_size, traffic, config, *known(CONFIGS[name].shape), SECONDS, timeout_s=HANG_S)
    report: TrafficReport = reports[0]
    print(name, report)
    faults = traffic_faults(reports)
    assert not faults, "\n".join(faults)
    assert report.cancelled


def test_another_id_is_found() -> None:
    submits, expected = known()
    wrong = {name: [*ids[:-1], ids[-1] + 1] for name, ids in expected.items()}
    config = traffic_config("tp1", "cpu")
    report = traffic(SoloCommunicator(), config, submits, wrong, 0.0)
    assert len(report.mismatches) == report.finished > 0
    for mismatch in report.mismatches:
        ids = expected[mismatch.request.partition("|")[0]]
        assert (mismatch.found, mismatch.position) == (ids, len(ids) - 1)
    assert sum("other ids" in fault for fault in traffic_faults([report])) == report.finished


def test_what_is_lost_or_grows_is_found() -> None:
    grown = TrafficReport(
        device_bytes=[0, 0, 0, 0, 9 << 20, 9 << 20], host_bytes=[0, 0, 0, 0, 0, 0],
        most_at_first=8,
        most_at_last=7, pages_left={"full": 1}, finished=1,
    )  # fmt: skip
    drafter = TrafficReport(compiled=1, compiled_names=["a kernel for 7 rows"])
    faults = " / ".join(traffic_faults([grown, drafter]))
    for words in ("pages", "at one time", "card", "rank 1: 1 Triton programs", "a kernel for 7 rows"):
        assert words in faults
