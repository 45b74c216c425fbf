"""`gemray bench` on tiny models: every combination runs, the report is whole, and no figure is asserted."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gemray_cluster.bench.plot import plot
from gemray_cluster.bench.report import Report, Row, Spread
from gemray_cluster.bench.tables import markdown, read_peers
from gemray_cluster.cli import app
from gemray_workers.errors import InvalidField
from support.checkpoints.tiny import Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash

GEMRAY = [sys.executable, "-c", "from gemray_cluster.cli import main; main()"]
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
kv_memory = 67108864
page_size = 4

[[setup]]
name = "plain"
model = "31B/target"

[[setup]]
name = "mtp"
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
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=240, check=False, env=environment
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
    assert found == [
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
        assert row.prefill.samples == 2
        assert 0 < row.step.p10 <= row.step.median <= row.step.p90
        assert row.step.median >= row.verify.p10
        assert (row.draft.median > 0.01) == (row.method != "none")
        assert row.floor.ms == pytest.approx(
            1000 * (row.floor.target_bytes + row.floor.drafter_bytes) / row.floor.bandwidth
        )
        assert (row.floor.drafter_bytes > 0) == (row.method != "none")
        assert (row.floor.experts_touched is not None) == (row.model == "target" and row.name == "two ranks")
        assert row.weight_bytes > 0


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


def test_a_setup_that_cannot_run_costs_no_other(output: Path) -> None:
    (failure,) = report_of(output).failures
    assert failure.name == "three ranks do not divide it"
    assert "InvalidField: tensor_parallel_size = 3" in failure.reason


def test_profiles_lie_beside_the_report(output: Path) -> None:
    names = report_of(output).profiles
    assert names == ["profile-dflash-batch1.txt", "profile-dflash-batch3.txt"]
    text = (output / names[0]).read_text()
    assert text.startswith("3 cycles, ")
    assert "aten::mm" in text


def test_markdown_sets_rows_beside_peers(output: Path, tmp_path: Path) -> None:
    peers = tmp_path / "peers.toml"
    peers.write_text(
        '[[peer]]\nmodel = "target"\ntp = 1\nmethod = "mtp"\ndraft_tokens = 4\nbatch = 3\npeer_ms = 31.3\n'
    )
    lines = markdown(report_of(output), read_peers(peers)).splitlines()
    rows = [line for line in lines if line.startswith("| target")]
    assert len(rows) == 10
    assert [row.endswith("| 31.3 | - | - |") for row in rows] == [False] * 3 + [True] + [False] * 6
    assert "Failed: three ranks" in lines[-1]
    assert (output / "bench.md").read_text().count("| target") == 10


def test_a_picture(output: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra `bench`")
    assert plot(report_of(output).rows, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_real_weights_are_measured_as_they_guess(tmp_path: Path) -> None:
    target = tiny_checkpoint("31B")
    done = gemray(
        "bench", "--model", target, "--drafter", tiny_assistant(target), "--device", "cpu", "--dtype", "float64",
        "--batch", "2", "--prompt-len", 9, "--steps", 3, "--kv-memory", "64MiB", "--output", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = report_of(tmp_path).rows
    assert row.acceptance_asked is None
    assert row.dtype == "float64"
    assert row.model == target.name
    assert " | mtp 4 | 2 | " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "m", "--acceptance-length", "3"], "except with random weights"),
        (["--model", "m", "--random-weights", "--acceptance-length", "0.5"], "acceptance_length = 0.5"),
        (["--address", "127.0.0.1:1", "--acceptance-length", "3"], "unset with --acceptance-length"),
        (["--address", "127.0.0.1:1", "--random-weights", "--tp", "2"], "unset with --random-weights, --tp"),
        (["--model", "m", "--batch", "1,x"], "batch = '1,x' is not allowed"),
        (["--model", "m", "--steps", "0"], "steps = 0"),
        (["--random-weights"], "model = None"),
        (["--suite", "/none.toml"], "a readable TOML file"),
    ],
)
def test_refusals_are_sentences(arguments: list[str], words: str) -> None:
    with pytest.raises(InvalidField, match=words):
        app(["bench", *arguments], standalone_mode=False)


def test_suites_of_the_repository_name_what_is_there() -> None:
    from gemray_cluster.bench.settings import read_suite
    from gemray_workers.rank.blueprint import Blueprint

    benchmarks = Path(__file__).resolve().parents[3] / "benchmarks"
    peers = read_peers(benchmarks / "peers.toml")
    work = set()
    for suite in sorted((benchmarks / "suites").glob("*.toml")):
        for setup in read_suite(suite, {"device": "cpu"}):
            traits = Blueprint.of(setup.engine_config()).drafter.traits
            for batch in setup.batch:
                work.add((Path(setup.model).name, setup.tp, traits.method, traits.max_draft_tokens, batch))
    wanted = {key for key in peers if key[4] in (1, 8) and key[0] != "E2B-it"}
    assert wanted <= work


def test_spread() -> None:
    assert Spread.of([3.0]) == Spread(median=3.0, p10=3.0, p90=3.0, samples=1)
    spread = Spread.of([float(n) for n in range(101)])
    assert (spread.median, spread.p10, spread.p90) == (50.0, 10.0, 90.0)
    assert math.isclose(json.loads(msgspec.json.encode(spread))["p90"], 90.0)
    assert Row.__struct_fields__[0] == "name"
