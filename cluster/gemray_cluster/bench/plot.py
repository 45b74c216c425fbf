"""A picture of a report: each row's step in its parts, and the floor."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gemray_cluster.bench.report import Row


def plot(rows: Sequence[Row], path: Path) -> bool:
    """Write a PNG; False when matplotlib is not installed."""
    try:
        matplotlib: Any = import_module("matplotlib")
    except ImportError:
        return False
    matplotlib.use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")

    labels = [f"{r.model} TP{r.tp} {r.method} {r.draft_tokens or ''} b{r.batch}" for r in rows]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.32 * len(rows)))
    left = [0.0] * len(rows)
    for part in ("draft", "verify", "rest"):
        widths = [getattr(row, part).median for row in rows]
        axes.barh(labels, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.plot([row.floor.ms for row in rows], labels, "k|", markersize=14, label="floor")
    axes.invert_yaxis()
    axes.set_xlabel("ms a cycle, median")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
