"""`gemray bench` with an MTP assistant and a DFlash drafter in one engine: rows name one, or leave it to the engine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from gemray_cluster.bench.report import Report
from gemray_cluster.bench.run import run_offline
from gemray_cluster.bench.settings import Rate, Setup
from gemray_cluster.bench.suites import read_suite
from gemray_workers.embedded import embedded_path
from gemray_workers.errors import InvalidField

DRAFTERS = ("gemray-tiny-dflash", "gemray-tiny-assistant")
SUITE = """
[[setup]]
name = "both"
model = "gemray-tiny"
drafter = ["gemray-tiny-dflash", "gemray-tiny-assistant"]
draft_method = ["auto", "mtp", "dflash", "none"]
device = "cpu"
dtype = "float32"
batch = 2
sampling = ["greedy", "published"]
prompt_len = 9
steps = 4
warm_up_steps = 3
prefills = 2
kv_memory = 67108864
"""
LOAD = """
[load]
rates = [50.0]
prompt = [{tokens = 5, share = 1}]
output = [{tokens = 3, share = 1}]
first_token_limit_ms = 1000
between_tokens_limit_ms = 100
seconds = 0.2
warm_up_seconds = 0.1
"""


def setup(**changes: object) -> Setup:
    return Setup.of({"name": "s", "model": str(embedded_path("gemray-tiny")), "device": "cpu", **changes}, "a test")


def directories(*names: str) -> list[str]:
    return [str(embedded_path(name)) for name in names]


def test_each_row_has_the_drafter_that_its_requests_name(tmp_path: Path) -> None:
    (tmp_path / "suite.toml").write_text(SUITE)
    report = run_offline(read_suite(tmp_path / "suite.toml", {}), tmp_path, None, Console(quiet=True))
    assert not report.failures
    assert msgspec.json.decode((tmp_path / "bench.json").read_bytes(), type=Report).rows == report.rows
    rows = {(row.draft_method, row.sampling): row for row in report.rows}
    assert [key[0] for key in rows] == [m for m in ("auto", "mtp", "dflash", "none") for _ in range(2)]
    for (draft_method, _), row in rows.items():
        assert row.drafter == " + ".join(DRAFTERS)
        assert row.method == ("mtp+dflash" if draft_method == "auto" else draft_method)
        assert (row.draft.median > 0.01) == (draft_method != "none")
    num_rounds = 4 * 2
    named = {draft_method: rows[draft_method, "greedy"] for draft_method in ("auto", "mtp", "dflash", "none")}
    assert named["mtp"].rounds == {"mtp": num_rounds, "dflash": 0}
    assert named["dflash"].rounds == {"mtp": 0, "dflash": num_rounds}
    assert named["none"].rounds == {}
    assert 0 < sum(named["auto"].rounds.values()) <= num_rounds
    assert named["mtp"].draft_tokens < named["dflash"].draft_tokens == named["auto"].draft_tokens
    assert named["none"].draft_tokens == named["none"].floor.drafter_bytes == 0
    busiest = max(named["auto"].rounds, key=lambda method: named["auto"].rounds[method])
    assert named["auto"].floor.drafter_bytes == named[busiest].floor.drafter_bytes > 0
    text = (tmp_path / "bench.md").read_text()
    assert "| mtp 4, named |" in text
    assert "| none, named |" in text
    assert "(rounds: mtp " in text
    published = [line for line in text.splitlines() if "| published |" in line]
    assert all(line.split("|")[9].strip() != "-" for line in published), "each beside the greedy row of its drafter"


def test_requests_that_arrive_name_a_drafter_too(tmp_path: Path) -> None:
    suite = SUITE.replace("batch = 2", "batch = []") + LOAD
    (tmp_path / "suite.toml").write_text(suite)
    (both,) = read_suite(tmp_path / "suite.toml", {"draft_method": ("auto", "mtp"), "deadline_s": 600.0})
    assert [str(work) for work in both.work] == ["50 requests/s", "50 requests/s, mtp named"]
    assert all(isinstance(work, Rate) for work in both.work)
    report = run_offline([both], tmp_path, None, Console(quiet=True))
    assert not report.failures
    assert [row.method for row in report.rates] == ["mtp+dflash", "mtp"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drafter": directories(*DRAFTERS, "gemray-tiny-assistant")}, "drafter = .* one MTP assistant and one DFlash"),
        ({"draft_method": "eagle"}, "draft_method = 'eagle' is not allowed: one of auto, none, mtp, dflash"),
        ({"draft_method": "mtp"}, "draft_method = 'mtp' is not allowed: one of auto, none: drafters of the setup"),
        ({"drafter": directories("gemray-tiny-dflash"), "draft_method": ["dflash", "mtp"]},
         "draft_method = 'mtp' is not allowed: one of auto, none, dflash"),
        ({"drafter": directories(*DRAFTERS), "method": "none", "draft_method": "mtp"}, "draft_method = 'mtp'"),
        ({"drafter": directories(DRAFTERS[0], DRAFTERS[0])}, "second_drafter_path = .* different kinds"),
        ({"drafter": directories(*DRAFTERS), "drafter_placement": "dedicated"}, "colocated, as there are two drafters"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_starts(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidField, match=words):
        run_offline([setup(**changes)], tmp_path, None, Console(quiet=True))
