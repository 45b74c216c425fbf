"""Rows for people: a table on the terminal, and one in Markdown beside the figures of other engines."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from gemray_cluster.bench.report import OnlineRow, Report, Row, Spread

Key = tuple[str, int, str, int, int]
"""Model, ranks, method, drafts, batch."""
COLUMNS = (
    "model",
    "tp",
    "method",
    "batch",
    "prefill ms",
    "step ms (p10-p90)",
    "draft",
    "verify",
    "rest",
    "busy",
    "floor ms",
    "x floor",
    "tok/s @ length",
)
PEER_COLUMNS = ("peer ms", "peer's floor ms", "target ms")


def terminal_table(rows: Iterable[Row]) -> Table:
    """For rich."""
    table = Table(title="gemray bench", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("model", "method") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def online_table(rows: Iterable[OnlineRow]) -> Table:
    """For rich."""
    table = Table(title="gemray bench of a server", title_justify="left")
    for column in ("batch", "method", "first token ms", "between messages ms", "tokens/s", "acceptance length"):
        table.add_column(column, justify="right")
    for row in rows:
        length = "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
        table.add_row(
            str(row.batch),
            row.method,
            _spread(row.first_token),
            _spread(row.between_messages),
            f"{row.tokens_per_s:.1f}",
            length,
        )
    return table


def one_line(row: Row) -> str:
    """A row as it comes, for logs."""
    return " | ".join(_cells(row))


def markdown(report: Report, peers: Mapping[Key, Sequence[float | None]]) -> str:
    """Device, versions, date, and the table; the peers' columns where a figure of the same work is known."""
    columns = (*COLUMNS, *(PEER_COLUMNS if peers else ()))
    lines = [
        f"Device: {', '.join(report.devices)}. Date: {report.date}. "
        + ", ".join(f"{name} {version}" for name, version in report.versions.items())
        + ".",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + " --- |" * len(columns),
    ]
    for row in report.rows:
        peer = peers.get(_key(row), (None,) * len(PEER_COLUMNS)) if peers else ()
        lines.append("| " + " | ".join((*_cells(row), *("-" if p is None else f"{p:g}" for p in peer))) + " |")
    lines += [f"\nFailed: {failure.name}: {failure.reason.splitlines()[-1]}" for failure in report.failures]
    return "\n".join(lines) + "\n"


def read_peers(path: Path | None) -> dict[Key, tuple[float | None, float | None, float | None]]:
    """Other figures for the same work, from a TOML file of ``[[peer]]`` tables."""
    if path is None:
        return {}
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        (p["model"], p["tp"], p["method"], p["draft_tokens"], p["batch"]): (
            p.get("peer_ms"),
            p.get("floor_ms"),
            p.get("target_ms"),
        )
        for p in content["peer"]
    }


def _key(row: Row) -> Key:
    return row.model, row.tp, row.method, row.draft_tokens, row.batch


def _cells(row: Row) -> tuple[str, ...]:
    method = row.method if not row.draft_tokens else f"{row.method} {row.draft_tokens}"
    if row.placement == "dedicated":
        method += " dedicated"
    return (
        row.model,
        str(row.tp),
        method,
        str(row.batch),
        f"{row.prefill.median:.1f}",
        _spread(row.step),
        f"{row.draft.median:.2f}",
        f"{row.verify.median:.2f}",
        f"{row.rest.median:.2f}",
        "-" if row.busy_ms is None else f"{row.busy_ms:.2f}",
        f"{row.floor.ms:.2f}",
        f"{row.step.median / row.floor.ms:.2f}",
        f"{row.tokens_per_s:.1f} @ {row.acceptance_length:.2f}",
    )


def _spread(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.p10:.2f}-{spread.p90:.2f})"
