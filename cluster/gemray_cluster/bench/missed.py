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
MOST_GAP_MS = 0.1
"""With a cycle in flight, at any batch."""
MOST_X_GREEDY = 1.03
"""Allowed of rows that draw as published."""
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
            yield (work_of(row), missed, *_parts(row), _busiest(row))


def long_gaps(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each row with lag 1 whose device waits longer between two cycles than is asked for."""
    for row in rows:
        if row.lag == 1 and row.gap.median > MOST_GAP_MS:
            yield f"More than {MOST_GAP_MS} ms between two cycles: {work_of(row)}: {row.gap.median:.3f} ms"


def dear_sampling(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each row in which the published sampling costs more over greedy than is asked for."""
    for row in rows:
        times = x_greedy(row, rows)
        if times is not None and times > MOST_X_GREEDY:
            experts = "" if row.experts is None else " (other ids touch other experts)"
            yield f"More than {MOST_X_GREEDY} times the greedy row: {work_of(row)}: {times:.3f} times{experts}"


def x_greedy(row: Row, rows: Sequence[Row]) -> float | None:
    """Time of a step over that of the greedy row of the same work among `rows`."""
    same = ("name", "batch", "lag", "draft_tokens", "draft_method")
    for other in rows:
        if other.sampling == "greedy" != row.sampling and all(getattr(other, f) == getattr(row, f) for f in same):
            return row.step.median / other.step.median
    return None


def work_of(row: Row) -> str:
    """Name a row by its work, for people."""
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
