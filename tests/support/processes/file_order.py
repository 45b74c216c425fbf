"""Order of test files for workers that take one file after another: the longest first, so that none is left for last.

For pytest-xdist's `--dist loadfile` with `--no-loadscope-reorder`; without that option it sorts files by their number
of tests, which begins with files of many short ones.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

SLOW, QUICK = 20.0, 0.2
"""Seconds of a test with the mark `slow` and of one without, more or less."""
MANY_SHORT = {
    "test_speculation_ids.py": 90.0,
    "test_cli.py": 25.0,
    "test_engine_lag.py": 23.0,
    "test_helm_chart.py": 25.0,
}
"""Files that are long though none of their tests is: CPU seconds on two cores (2026-11-29)."""


def longest_files_first(items: list[pytest.Item]) -> None:
    """Sort files by the seconds of their tests; a file's tests stay together, in their order."""
    seconds: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        seconds[item.path] += SLOW if item.get_closest_marker("slow") else QUICK
    for path in seconds:
        seconds[path] = max(seconds[path], MANY_SHORT.get(path.name, 0.0))
    items.sort(key=lambda item: (-seconds[item.path], str(item.path)))
