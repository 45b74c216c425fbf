"""A run of `gemray bench`: setup after setup, the report rewritten after every row, so that nothing is lost."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from gemray_cluster.bench.kv_memory import with_kv_memory
from gemray_cluster.bench.load import Load
from gemray_cluster.bench.peers import Peers, read_peers
from gemray_cluster.bench.plot import plot
from gemray_cluster.bench.processes import RankProcesses, SetupFailed, TimeIsUp
from gemray_cluster.bench.refusals import in_settings_names, require_cards
from gemray_cluster.bench.report import AnyRow, Failure, NotRun, Part, PrefillRow, RateRow, Report, Row
from gemray_cluster.bench.settings import Setup
from gemray_cluster.bench.tables import (
    markdown,
    one_line,
    online_table,
    prefill_line,
    prefill_table,
    rate_line,
    rate_table,
    terminal_table,
    what_was_not_run,
    where_time_went,
)
from gemray_workers.errors import GemrayError, InvalidField

if TYPE_CHECKING:
    from gemray.client.server_address import ServerAddress


def run_offline(
    setups: Sequence[Setup],
    output: Path,
    peers: Path | None,
    console: Console,
    time_limit_s: float | None = None,
) -> Report:
    """Measure every setup on this machine. A row that cannot be measured is reported, and the next one runs; so is a
    setup that fails.

    Args:
        setups: in the order in which they are measured.
        output: the directory for the report and the profiles.
        peers: a file of other engines' figures, for the Markdown table.
        console: for rows as they come, and the tables.
        time_limit_s: seconds after which the run ends; what has not been measured then is listed. None is no limit.

    Raises:
        InvalidField: a setup names a directory that holds no model, or a `kv_memory` that does not hold its rows; the
            only one has settings that do not fit the model or this machine's cards; `output` cannot be made.
        GemrayError: a directory of the only setup cannot be used.
    """
    is_alone = len(setups) == 1
    for setup in setups:
        setup.require_files()
        if is_alone:
            require_cards(setup)
    setups = [_with_kv_memory(setup, is_alone=is_alone) for setup in setups]
    known = read_peers(peers)
    started = time.monotonic()
    until = math.inf if time_limit_s is None else started + time_limit_s
    report = _new_report(setups, time_limit_s)
    _make(output)
    with RankProcesses(output) as ranks:
        for setup in setups:
            missing = [str(work) for work in setup.work]
            try:
                for part in ranks.run(setup, until):
                    seconds = time.monotonic() - started
                    report.spent.append(msgspec.structs.replace(part.spent, until_s=seconds))
                    _take(part, missing, report, _Log(console, f" | {seconds:.1f} s"))
                    _write(report, output, known)
            except TimeIsUp:
                report.not_run += [NotRun(name=setup.name, work=work) for work in missing]
            except SetupFailed as error:
                report.failures.append(Failure(name=setup.name, reason=str(error), work=missing))
                _Log(console, f" | {time.monotonic() - started:.1f} s").line(f"{setup.name} failed: {error}")
            if line := where_time_went(report, setup.name):
                _Log(console).line(line)
            _write(report, output, known)
    _print(report, output, console)
    return report


@dataclass(frozen=True)
class _Log:
    """Lines as they come."""

    console: Console
    ending: str = ""

    def line(self, text: str) -> None:
        """Print it whole, whatever it contains."""
        self.console.print(text + self.ending, highlight=False, soft_wrap=True, markup=False)


def _with_kv_memory(setup: Setup, *, is_alone: bool) -> Setup:
    """As `with_kv_memory`. One of several that no rank will accept stays as it is: it fails alone, and says why."""
    try:
        return with_kv_memory(setup)
    except InvalidField as error:
        if is_alone or error.field == "kv_memory":
            raise in_settings_names(error) from error
    except GemrayError:
        if is_alone:
            raise
    return setup


def _make(output: Path) -> None:
    """Make the directory for the report, before anything is measured for it."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidField("output", str(output), f"a directory that can be made ({error.strerror})") from error
    if not os.access(output, os.W_OK | os.X_OK):
        raise InvalidField("output", str(output), "a directory that can be written to")


def _take(part: Part, missing: list[str], report: Report, log: _Log) -> None:
    """Report a part; its row is no longer missing."""
    if part.trouble is not None:
        name, work = part.spent.name, missing.pop(0)
        report.failures.append(Failure(name=name, reason=part.trouble, work=[work]))
        log.line(f"{name}: {work} failed: {part.trouble}")
    elif part.row is not None:
        del missing[0]
        _take_row(part.row, report, log)


def _take_row(row: AnyRow, report: Report, log: _Log) -> None:
    match row:
        case Row():
            report.rows.append(row)
            line = one_line(row, report.rows)
        case PrefillRow():
            report.prefill.append(row)
            line = prefill_line(row)
        case RateRow():
            report.rates.append(row)
            line = rate_line(row)
    report.devices = sorted({*report.devices, row.device})
    log.line(line)


def _print(report: Report, output: Path, console: Console) -> None:
    if report.rows:
        console.print(terminal_table(report.rows))
    if report.prefill:
        console.print(prefill_table(report.prefill))
    if report.rates:
        console.print(rate_table(report.rates))
    if not plot(report, output):
        console.print("no pictures: matplotlib is not installed (pip install 'gemray[bench]')", markup=False)
    for line in what_was_not_run(report):
        _Log(console).line(line)


def run_online(
    server: ServerAddress,
    batches: Sequence[int],
    prompt_len: int,
    max_tokens: int,
    output: Path,
    console: Console,
    draft_methods: Sequence[str] = ("auto",),
) -> Report:
    """Measure a running server under each number of concurrent requests, which name each of `draft_methods`."""
    from gemray_cluster.bench.online import measure_server  # gRPC, which measuring offline does without

    report = _new_report((), None)
    _make(output)
    for draft_method, batch in product(draft_methods, batches):
        row, devices = measure_server(server, batch, prompt_len, max_tokens, draft_method)
        report.online.append(row)
        report.devices = devices
        _write(report, output, None)
    console.print(online_table(report.online))
    return report


def run_load(server: ServerAddress, load: Load, output: Path, console: Console) -> Report:
    """Measure a running server under each rate of a load."""
    from gemray_cluster.bench.rate_online import ServerLoad

    report = _new_report((), None)
    _make(output)
    loaded = ServerLoad(server, load)
    loaded.warm_up()
    for rate in load.rates:
        _take_row(loaded.row(rate), report, _Log(console))
        _write(report, output, None)
    _print(report, output, console)
    return report


def _new_report(setups: Sequence[Setup], time_limit_s: float | None) -> Report:
    return Report(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        devices=[],
        versions=_versions(),
        settings=[asdict(setup) for setup in setups],
        time_limit_s=time_limit_s,
    )


def _write(report: Report, output: Path, peers: Peers | None) -> None:
    report.profiles = sorted(path.name for path in output.glob("profile-*.txt"))
    _replace(output / "bench.json", msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    if report.rows or report.prefill or report.rates:
        _replace(output / "bench.md", markdown(report, peers))


def _replace(path: Path, text: str) -> None:
    """Write the file whole or not at all: a run may be killed at any time."""
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
