"""Rows that miss what they are held against, and where their time goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gemray_cluster.bench.peers import Peers
from gemray_cluster.bench.report import Row

MISSED_COLUMNS = (
    "row",
    "missed",
    "step ms",
    "floor",
    "kernels beyond it",
    "between kernels",
    "between cycles",
    "else",
    "busiest kernels, ms a cycle",
)
_UNKNOWN = "-"


def missed_rows(rows: Sequence[Row], peers: Peers) -> Iterator[tuple[str, ...]]:
    """Cells of `MISSED_COLUMNS` for each row that misses its target or a bar."""
    for row in rows:
        verdict = peers.judge(row)
        limits = [("bar", bar) for bar in verdict.bars]
        if verdict.target is not None:
            limits.append(("target", verdict.target))
        missed = " and ".join(f"{name} {limit}" for name, limit in limits if not limit.holds(row))
        if missed:
            yield (_work(row), missed, *_parts(row), _busiest(row))


def _work(row: Row) -> str:
    ranks = f" TP{row.tp}" if row.tp > 1 else ""
    return f"{row.name}{ranks}, {row.drafting}, batch {row.batch}, {row.sampling}, lag {row.lag}"


def _parts(row: Row) -> tuple[str, ...]:
    """The step and what it is made of, which adds up to it but for medians' own ways."""
    step, floor, gap = row.step.median, row.floor.ms, row.gap.median
    on_device = row.draft.median + row.verify.median
    busy = on_device if row.busy_ms is None else row.busy_ms
    between = _UNKNOWN if row.busy_ms is None else f"{on_device - busy:.2f}"
    return (
        f"{step:.2f}",
        f"{floor:.2f}",
        f"{busy - floor:.2f}",
        between,
        f"{gap:.3f}",
        f"{step - on_device - gap:.2f}",
    )


def _busiest(row: Row) -> str:
    return ", ".join(f"{name} {ms:.2f}" for name, ms in row.busiest.items()) or _UNKNOWN
