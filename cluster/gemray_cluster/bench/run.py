"""A run of `gemray bench`: setup after setup, the report rewritten after every row, so that nothing is lost."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from gemray_cluster.bench.plot import plot
from gemray_cluster.bench.processes import RankProcesses, SetupFailed
from gemray_cluster.bench.report import Failure, Report
from gemray_cluster.bench.settings import Setup
from gemray_cluster.bench.tables import markdown, one_line, online_table, read_peers, terminal_table

if TYPE_CHECKING:
    from gemray_cluster.client.client import ServerAddress


def run_offline(setups: Sequence[Setup], output: Path, peers: Path | None, console: Console) -> Report:
    """Measure every setup on this machine. A setup that fails is reported, and the next one runs."""
    report = _new_report(setups)
    output.mkdir(parents=True, exist_ok=True)
    with RankProcesses(output) as ranks:
        for setup in setups:
            try:
                for row in ranks.run(setup):
                    report.rows.append(row)
                    report.devices = sorted({row.device for row in report.rows})
                    _write(report, output, peers)
                    console.print(one_line(row), highlight=False, soft_wrap=True)
            except SetupFailed as error:
                report.failures.append(Failure(name=setup.name, reason=str(error)))
                console.print(f"{setup.name} failed: {error}", highlight=False, soft_wrap=True, markup=False)
            _write(report, output, peers)
    if report.rows:
        console.print(terminal_table(report.rows))
        if not plot(report.rows, output / "bench.png"):
            console.print("no picture: matplotlib is not installed (pip install 'gemray[bench]')", markup=False)
    return report


def run_online(
    server: ServerAddress, batches: Sequence[int], prompt_len: int, max_tokens: int, output: Path, console: Console
) -> Report:
    """Measure a running server under each number of concurrent requests."""
    from gemray_cluster.bench.online import measure_server  # gRPC, which measuring offline does without

    report = _new_report(())
    output.mkdir(parents=True, exist_ok=True)
    for batch in batches:
        row, devices = measure_server(server, batch, prompt_len, max_tokens)
        report.online.append(row)
        report.devices = devices
        _write(report, output, None)
    console.print(online_table(report.online))
    return report


def _new_report(setups: Sequence[Setup]) -> Report:
    return Report(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        devices=[],
        versions=_versions(),
        settings=[asdict(setup) for setup in setups],
    )


def _write(report: Report, output: Path, peers: Path | None) -> None:
    report.profiles = sorted(path.name for path in output.glob("profile-*.txt"))
    _replace(output / "bench.json", msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    if report.rows:
        _replace(output / "bench.md", markdown(report, read_peers(peers)))


def _replace(path: Path, text: str) -> None:
    """Whole or not at all: a run may be killed at any time."""
    unfinished = path.with_suffix(path.suffix + ".part")
    unfinished.write_text(text + ("" if text.endswith("\n") else "\n"), encoding="utf-8")
    os.replace(unfinished, path)


def _versions() -> dict[str, str]:
    import torch

    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("gemray", "triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return found
