"""Pictures of a report: cycles in their parts, throughput over batch sizes, and answers under a rate."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gemray_cluster.bench.report import RateRow, Report, Row

DPI = 120
LEAST_BATCHES = 3
"""Batch sizes of one setup from which on they make a line."""
_LETTERS_BELOW = 5.5
"""Heights of the legend's letters, which ticks and label below axes take."""
PARTS = {
    "draft": "draft: the drafter's part of a cycle",
    "verify": "verify: the target's pass and the choice of tokens",
    "gap": "gap: the device waits for the next cycle",
}


def plot(report: Report, directory: Path) -> bool:
    """Write the PNGs that the report has rows for; False when matplotlib is not installed."""
    try:
        matplotlib: Any = import_module("matplotlib")
    except ImportError:
        return False
    matplotlib.use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    if report.rows:
        _save(pyplot, _cycles(pyplot, report.rows), directory / "cycles.png")
    sweeps = _sweeps(report.rows)
    if sweeps:
        _save(pyplot, _sweep(pyplot, sweeps), directory / "batches.png")
    if report.rates:
        _save(pyplot, _rates(pyplot, report.rates), directory / "rates.png")
    return True


def _cycles(pyplot: Any, rows: Sequence[Row]) -> Any:
    """A bar for each row, of its parts one after the other, and a mark where the floor is."""
    figure, axes = pyplot.subplots(figsize=(11, 2.0 + 0.3 * len(rows)))
    places = range(len(rows))
    left = [0.0] * len(rows)
    for part, meaning in PARTS.items():
        widths = [getattr(row, part).median for row in rows]
        axes.barh(places, widths, left=left, height=0.7, label=meaning)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.plot(
        [row.floor.ms for row in rows], places, "k|", markersize=12, markeredgewidth=2,
        label="floor: the weights it needs, read once at the fastest rate",
    )  # fmt: skip
    for place, row, end in zip(places, rows, left, strict=True):
        axes.text(max(end, row.floor.ms), place, f"  {row.step.median:.2f}", va="center", fontsize=8)
    axes.set_yticks(places, [_label(row) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("milliseconds of a cycle, medians; the number is the whole step by the host's clock")
    axes.set_title(f"Cycles of {', '.join(sorted({row.device for row in rows}))}", loc="left")
    _legend_below(axes, columns=2)
    return figure


def _sweeps(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of one setup, sampling and lag, by batch size."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row.name}, {row.sampling}, lag {row.lag}", []).append(row)
    return {name: sorted(same, key=lambda row: row.batch) for name, same in found.items() if len(same) >= LEAST_BATCHES}


def _sweep(pyplot: Any, sweeps: dict[str, list[Row]]) -> Any:
    """What a sequence gets against what all get together; a point for each batch size."""
    figure, axes = pyplot.subplots(figsize=(9, 6.5))
    for name, rows in sweeps.items():
        x, y = [row.tokens_per_s / row.batch for row in rows], [row.tokens_per_s for row in rows]
        axes.plot(x, y, "o-", label=name)
        for row, at in zip(rows, zip(x, y, strict=True), strict=True):
            axes.annotate(str(row.batch), at, textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens a second that one sequence gets")
    axes.set_ylabel("tokens a second of all sequences together")
    axes.set_title("Batch sizes (the number at each point)", loc="left")
    axes.grid(alpha=0.3, which="both")
    _legend_below(axes, columns=2)
    return figure


def _rates(pyplot: Any, rows: Sequence[RateRow]) -> Any:
    """Three panels over the rate: first tokens, the time between tokens, good answers."""
    figure, (first, between, good) = pyplot.subplots(1, 3, figsize=(14, 5))
    by_name: dict[str, list[RateRow]] = {}
    for row in rows:
        by_name.setdefault(f"{row.name}, {row.method}", []).append(row)
    for i, (name, unsorted) in enumerate(by_name.items()):
        same = sorted(unsorted, key=lambda row: row.rate)
        color = f"C{i}"
        for axes, quantity in ((first, "first_token"), (between, "between_tokens")):
            known = [(row.rate, getattr(row, quantity)) for row in same if getattr(row, quantity) is not None]
            for field, words, style in (("p50", "half took no longer", "o-"), ("p99", "99 in 100", "s--")):
                axes.plot(
                    [rate for rate, _ in known], [getattr(value, field) for _, value in known], style,
                    color=color, label=f"{name}: {field} ({words})",
                )  # fmt: skip
        good.plot([row.rate for row in same], [row.goodput for row in same], "o-", color=color, label=name)
    rates = [row.rate for row in rows]
    good.plot(sorted(rates), sorted(rates), "k:", label="all that arrive")
    first_limits = {row.first_token_limit_ms for row in rows}
    between_limits = {row.between_tokens_limit_ms for row in rows}
    for axes, limits in ((first, first_limits), (between, between_limits)):
        for limit in sorted(limits):
            axes.axhline(limit, color="k", linestyle=":", label=f"limit of a good answer: {limit:g} ms")
    first.set_yscale("log")  # a queue that grows is a thousand times as long as none
    first.yaxis.set_major_formatter("{x:g}")
    for axes in (between, good):
        axes.set_ylim(bottom=0)
    first.set_title("Arrival to first token, queue included", loc="left")
    between.set_title("Between two tokens of a request", loc="left")
    good.set_title("Goodput: answers within both limits", loc="left")
    for axes, unit in ((first, "milliseconds"), (between, "milliseconds"), (good, "good requests a second")):
        axes.set_xlabel("requests that arrive a second (Poisson)")
        axes.set_ylabel(unit)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        _legend_below(axes, columns=1)
    return figure


def _label(row: Row) -> str:
    method = row.drafting if row.draft_tokens else "no drafter"
    ranks = f" TP{row.tp}" if row.tp > 1 else ""
    placement = " dedicated" if row.placement == "dedicated" else ""
    return f"{row.served}{ranks}, {method}{placement}, batch {row.batch}, {row.sampling}, lag {row.lag}"


def _legend_below(axes: Any, *, columns: int) -> None:
    """Put the legend below the axes and their label, however high the axes are: its distance is in letters."""
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=_LETTERS_BELOW, ncols=columns, fontsize=8,
        frameon=False,
    )  # fmt: skip


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    pyplot.close(figure)
