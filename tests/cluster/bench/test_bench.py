"""`gemray bench` on tiny models: every combination runs, the report is whole, and no figure is asserted."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from gemray_cluster.bench.peers import read_peers
from gemray_cluster.bench.plot import _cycles as picture_of_cycles
from gemray_cluster.bench.plot import plot
from gemray_cluster.bench.report import Report, Row, Spread
from gemray_cluster.bench.run import run_offline
from gemray_cluster.bench.suites import read_suite
from gemray_cluster.bench.tables import markdown, what_was_not_run
from gemray_cluster.cli.commands import app
from gemray_workers.errors import InvalidField
from support.checkpoints.tiny import Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.cluster.command import GEMRAY
from support.waiting import HANG_S

WITHOUT_RAY = [
    sys.executable,
    "-c",
    "import sys; sys.modules.update(ray=None, grpc=None); from gemray_cluster.cli import main; main()",
]
SUITE = """
[defaults]
random_weights = true
device = "cpu"
dtype = "float32"
batch = [1, 3]
prompt_len = 12
steps = 4
warm_up_steps = 1
prefills = 2
page_size = 4

[[setup]]
name = "plain"
model = "31B/target"
sampling = ["greedy", "published"]
lag = [1, 0]
prefill = [5, 30]

[[setup]]
name = "mtp"
batch = [1, 3]
model = "31B/target"
drafter = "31B/mtp"
draft_tokens = 4
acceptance_length = 2.5

[[setup]]
name = "three ranks do not divide it"
model = "31B/target"
tp = 3

[[setup]]
name = "dflash"
model = "31B/target"
drafter = "31B/dflash"
acceptance_length = 3
profile = true

[[setup]]
name = "dedicated"
model = "31B/target"
drafter = "31B/dflash"
drafter_placement = "dedicated"

[[setup]]
name = "two ranks"
model = "26B-A4B/target"
drafter = "26B-A4B/dflash"
tp = 2
kv_dtype = "fp8_e4m3"
"""


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configs of tiny targets and drafters, without weights, and a suite."""
    base = tmp_path_factory.mktemp("bench")
    names: tuple[Shape, ...] = ("31B", "26B-A4B")
    for name in names:
        target = tiny_checkpoint(name)
        for part, directory in (
            ("target", target),
            ("mtp", tiny_assistant(target)),
            ("dflash", tiny_dflash(target)),
        ):
            (base / name / part).mkdir(parents=True)
            shutil.copy(directory / "config.json", base / name / part)
    (base / "suite.toml").write_text(SUITE)
    return base


def gemray(*arguments: object, command: list[str] = GEMRAY) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=HANG_S, check=False, env=environment
    )


@pytest.fixture(scope="module")
def output(shapes: Path) -> Path:
    """What a run of the suite wrote, on a host without Ray and gRPC."""
    directory = shapes / "out"
    done = gemray("bench", "--suite", shapes / "suite.toml", "--output", directory, command=WITHOUT_RAY)
    assert done.returncode == 1, done.stderr  # one setup cannot run
    return directory


def report_of(output: Path) -> Report:
    return msgspec.json.decode((output / "bench.json").read_bytes(), type=Report)


def test_every_combination_gives_its_rows(output: Path) -> None:
    report = report_of(output)
    found = [(row.name, row.method, row.placement, row.tp, row.batch, row.draft_tokens) for row in report.rows]
    assert [(row.lag, row.sampling, row.batch) for row in report.rows if row.name == "plain"] == [
        (lag, sampling, batch) for lag in (1, 0) for sampling in ("greedy", "published") for batch in (1, 3)
    ]
    assert [key for i, key in enumerate(found) if key not in found[:i]] == [
        (name, method, placement, tp, batch, drafts)
        for name, method, placement, tp, drafts in (
            ("plain", "none", "colocated", 1, 0),
            ("mtp", "mtp", "colocated", 1, 4),
            ("dflash", "dflash", "colocated", 1, 7),
            ("dedicated", "dflash", "dedicated", 1, 7),
            ("two ranks", "dflash", "colocated", 2, 7),
        )
        for batch in (1, 3)
    ]
    for row in report.rows:
        assert row.step.samples == row.draft.samples == row.steps == 4
        assert row.prefill.samples == 1, "the first only warms up"
        assert 0 < row.step.p10 <= row.step.median <= row.step.p90
        assert row.gap.samples == 4
        assert 0 < row.gap.median < row.step.median
        assert row.step.median >= row.verify.p10
        assert (row.draft.median > 0.01) == (row.method != "none")
        assert row.floor.ms == pytest.approx(
            1000 * (row.floor.target_bytes + row.floor.drafter_bytes) / row.floor.bandwidth
        )
        assert row.floor.sum_bandwidth is not None
        assert row.floor.sum_bandwidth <= row.floor.bandwidth
        assert row.read_after is not None
        assert row.read_after <= row.floor.sum_bandwidth, "the best counts"
        assert (row.floor.drafter_bytes > 0) == (row.method != "none")
        assert (row.floor.experts_touched is not None) == (row.model == "target" and row.name == "two ranks")
        assert row.weight_bytes > 0
        assert (row.experts is not None) == (row.name == "two ranks")
        assert row.kv_dtype == ("fp8_e4m3" if row.name == "two ranks" else "auto")


def test_rows_of_experts_say_how_many_were_touched(output: Path) -> None:
    rows = [row for row in report_of(output).rows if row.name == "two ranks"]
    for row in rows:
        experts = row.experts
        assert experts is not None
        assert 2 <= experts.least <= experts.mean <= experts.most <= experts.num_experts == 8, "two of them a row"
        assert row.floor.experts_touched == experts.mean
    assert f" of {8} |" in (output / "bench.md").read_text()


def test_prompts_are_measured_alone(output: Path) -> None:
    report = report_of(output)
    assert [(row.name, row.num_tokens, row.chunk) for row in report.prefill] == [("plain", 5, 30), ("plain", 30, 30)]
    for row in report.prefill:
        assert row.first_token.samples == 3
        assert 0 < row.floor.ms < row.first_token.median
        assert row.floor.sustained_rate is not None
        assert row.floor.sustained_ms is not None
        assert row.floor.sustained_ms > 0
    short, long = report.prefill
    # Six times the tokens, and once what only the last one meets.
    assert short.floor.operations < long.floor.operations < 6 * short.floor.operations
    assert "| target | 1 | 30 | 30 |" in (output / "bench.md").read_text()


def test_made_up_acceptance_is_what_was_asked_for(output: Path) -> None:
    by_name = {row.name: row for row in report_of(output).rows}
    assert by_name["mtp"].acceptance_length == pytest.approx(2.5)
    assert by_name["dflash"].acceptance_length == 3.0
    assert by_name["plain"].acceptance_length == 1.0


def test_the_report_says_where_and_with_what(output: Path) -> None:
    report = report_of(output)
    assert report.devices == ["cpu"]
    assert {"python", "torch", "transformers", "gemray"} <= report.versions.keys()
    assert report.date.endswith("+00:00")
    assert (report.settings[0]["name"], report.settings[0]["prompt_len"]) == ("plain", 12)


def test_the_report_says_where_the_time_went(output: Path) -> None:
    report = report_of(output)
    works = {setup.name: [str(work) for work in setup.work] for setup in read_suite(output.parent / "suite.toml", {})}
    spent = {name: [part.what for part in report.spent if part.name == name] for name in works}
    refused = "three ranks do not divide it"
    assert spent == {name: ["probes", "load", *work] if name != refused else [] for name, work in works.items()}
    ends = [part.until_s for part in report.spent]
    assert ends == sorted(ends)
    for before, part in pairwise(report.spent):
        assert 0 <= part.seconds <= part.until_s
        assert before.until_s <= part.until_s
    for part in report.spent:
        assert ("warm-up" in part.parts) == (part.what == "load")
        assert sum(part.parts.values()) <= part.seconds
    text = (output / "bench.md").read_text()
    assert re.search(r"plain took probes \S+ s, load \S+ s \(peers .*, warm-up \S+\), rows ", text)
    assert f"{refused} took" not in text


def test_reports_of_before_are_read_with_what_they_lack(output: Path) -> None:
    old = json.loads((output / "bench.json").read_text())
    del old["spent"]
    for row in old["rows"]:
        del row["floor"]["sum_bandwidth"], row["floor"]["sum_ms"], row["read_after"], row["busiest"]
    for row in old["prefill"]:
        del row["floor"]["sustained_rate"], row["floor"]["sustained_ms"]
    for failure in old["failures"]:
        del failure["work"]
    lines = markdown(msgspec.json.decode(json.dumps(old), type=Report), None).splitlines()
    assert [line.split("|")[-4:-2] for line in lines if line.startswith("| target | 1 | 5 |")] == [[" - ", " - "]]
    assert any(
        line.startswith("Failed: three ranks do not divide it: rank 0: ") or "divide it: " in line for line in lines
    )


def test_a_setup_that_cannot_run_costs_no_other(output: Path) -> None:
    (failure,) = report_of(output).failures
    assert failure.name == "three ranks do not divide it"
    assert "InvalidField: tensor_parallel_size = 3" in failure.reason


def test_profiles_lie_beside_the_report(output: Path) -> None:
    names = report_of(output).profiles
    assert names == ["profile-dflash-batch1-greedy-lag1.txt", "profile-dflash-batch3-greedy-lag1.txt"]
    text = (output / names[0]).read_text()
    assert text.startswith("3 cycles, ")
    assert "aten::mm" in text


def test_markdown_sets_rows_beside_peers(output: Path, tmp_path: Path) -> None:
    peers = tmp_path / "peers.toml"
    peers.write_text(
        '[[peer]]\nmodel = "target"\ntp = 1\nmethod = "mtp"\ndraft_tokens = 4\nbatch = 3\npeer_ms = 31.3\n'
        "bar_ms = 1e9\ntarget_ms = 1e-9\n"
    )
    lines = markdown(report_of(output), read_peers(peers)).splitlines()
    rows = [line for line in lines if line.startswith(("| target |", "| target (fp8_e4m3 KV) |"))]
    assert len(rows) == 18, "16 of batches, 2 of prompts"
    assert [row.endswith("| 31.3 | 1e+09 ms | 1e-09 ms | bar |") for row in rows] == [i == 9 for i in range(18)]
    assert any(line.startswith("Failed: three ranks do not divide it: batch 1, greedy, lag 1; ") for line in lines)
    assert (output / "bench.md").read_text().count("| target") == 18


def test_a_picture(output: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra `bench`")
    assert plot(report_of(output), tmp_path)
    assert (tmp_path / "cycles.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [1, 2, 18])
def test_a_pictures_legend_covers_nothing(output: Path, count: int) -> None:
    pyplot: Any = pytest.importorskip("matplotlib.pyplot", reason="the picture needs the extra `bench`")
    figure = picture_of_cycles(pyplot, report_of(output).rows[:count])
    figure.canvas.draw()
    (axes,) = figure.axes
    legend, label = axes.get_legend().get_window_extent(), axes.xaxis.label.get_window_extent()
    assert legend.y1 < label.y0 < axes.get_window_extent().y0
    pyplot.close(figure)


def bench(*arguments: object) -> None:
    """The command in this process, whose ranks are forked from what it has imported."""
    app(["bench", *map(str, arguments)], standalone_mode=False)


def test_real_weights_are_measured_as_they_guess(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny_checkpoint("31B")
    bench(
        "--model", target, "--drafter", tiny_assistant(target), "--device", "cpu", "--dtype", "float64",
        "--batch", "2", "--prompt-len", 9, "--steps", 3, "--kv-memory", "64MiB", "--output", tmp_path,
    )  # fmt: skip
    (row,) = report_of(tmp_path).rows
    assert row.acceptance_asked is None
    assert row.dtype == "float64"
    assert row.model == target.name
    assert " | mtp 4 | 2 | " in capsys.readouterr().out


def test_an_embedded_model_is_called_by_its_name(tmp_path: Path) -> None:
    bench(
        "--model", "gemray-tiny", "--drafter", "gemray-tiny-assistant", "--device", "cpu", "--dtype", "float32",
        "--batch", "1", "--prompt-len", 9, "--steps", 2, "--kv-memory", "64MiB", "--output", tmp_path,
    )  # fmt: skip
    (row,) = report_of(tmp_path).rows
    assert (row.model, row.drafter) == ("gemray-tiny", "gemray-tiny-assistant")


def test_a_time_limit_ends_the_run_and_lists_what_was_left_out(shapes: Path, tmp_path: Path) -> None:
    suite = read_suite(shapes / "suite.toml", {"steps": 3_500}, ["plain", "mtp"])
    report = run_offline(suite, tmp_path, None, Console(quiet=True), time_limit_s=6.0)
    assert not report.failures
    assert [(row.name, row.work) for row in report.not_run] == [(s.name, str(work)) for s in suite for work in s.work]
    assert report_of(tmp_path).not_run == report.not_run
    left_out = what_was_not_run(report)[-1]
    assert left_out.startswith("Not run (time limit of 6 s), nothing of: ")
    assert left_out.endswith("mtp")
    assert left_out in markdown(report, None)


DEDICATED = ("--drafter-placement", "dedicated", "--drafter")
TINY = ("--model", "gemray-tiny", "--device", "cpu", "--prompt-len", "16", "--steps", "1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "m", "--acceptance-length", "3"], "except with random weights"),
        (["--address", "127.0.0.1:1", "--acceptance-length", "3"], "unset with --acceptance-length"),
        (["--address", "127.0.0.1:1", "--random-weights", "--tp", "2"], "unset with --random-weights, --tp"),
        (["--model", "m", "--batch", "1,x"], "batch = '1,x' is not allowed"),
        (["--random-weights"], "model = None"),
        (["--suite", "/none.toml"], r"a readable TOML file \(No such file or directory\)"),
        (["--suite", sys.executable], r"a TOML file \('utf-8' codec can't decode"),
        (["--model", "/none"], "model = '/none' is not allowed: a directory with a config.json, or the name of an emb"),
        (["--model", "gemray-tiny", "--drafter", "gemray-smal"], "drafter = 'gemray-smal' is not allowed"),
        (["--model", "m", "--sampling", "greedy,drawn"], "sampling = 'drawn' is not allowed: greedy or published"),
        (["--model", "gemray-tiny", "--peers", "/none.toml"], "peers = '/none.toml' is not allowed"),
        (
            [*TINY, "--numerics", "exact", "--tp", "3"],
            "tp = 3 is not allowed: it must divide",
        ),
        ([*TINY, "--tp", "3"], "tp = 3 is not allowed"),
        ([*TINY, "--prefill", "99999"], "prompt_len, steps or prefill = 100001 is not allowed: 2 to 2048"),
        (
            [*TINY, "--drafter", "gemray-tiny-dflash", "--draft-tokens", "99"],
            "draft_tokens = 99 is not allowed: 0 to 15",
        ),
        (
            [*TINY, "--output", "/proc/none"],
            r"output = '/proc/none' is not allowed: a directory that can be made \(No such",
        ),
    ],
)
def test_refusals_are_sentences(arguments: list[str], words: str) -> None:
    with pytest.raises(InvalidField, match=words):
        app(["bench", *arguments], standalone_mode=False)


@pytest.mark.parametrize(
    ("cards", "flags", "words"),
    [
        (0, [], "device = 'cuda' is not allowed: cpu: torch finds no CUDA device here"),
        (1, ["--tp", "2"], "tp = 2 is not allowed: as many as there are cards, 1: each rank is on one"),
        (1, [*DEDICATED, "gemray-tiny-dflash"], "tp = 1 .* 1: each rank is on one and the drafter on another"),
    ],
)
def test_cards_that_are_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch, cards: int, flags: list[str], words: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: cards > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: cards)
    with pytest.raises(InvalidField, match=words):
        app(["bench", "--model", "gemray-tiny", "--device", "cuda", *flags], standalone_mode=False)


def test_spread() -> None:
    assert Spread.of([3.0]) == Spread(median=3.0, p10=3.0, p90=3.0, samples=1)
    spread = Spread.of([float(n) for n in range(101)])
    assert (spread.median, spread.p10, spread.p90) == (50.0, 10.0, 90.0)
    assert math.isclose(json.loads(msgspec.json.encode(spread))["p90"], 90.0)
    assert Row.__struct_fields__[0] == "name"
