"""Files with slow tests come first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.processes.file_order import longest_files_first


@dataclass
class Item:
    """A test as far as its place is concerned."""

    path: Path
    name: str
    is_slow: bool = False

    def get_closest_marker(self, mark: str) -> bool:
        return mark == "slow" and self.is_slow


def test_files_with_slow_tests_come_first_and_whole() -> None:
    many, slow, slower = Path("many.py"), Path("slow.py"), Path("slower.py")
    items: list[Any] = [
        *(Item(many, f"m{i}") for i in range(50)),
        Item(slow, "s0"),
        Item(slow, "s1", is_slow=True),
        Item(slower, "t0", is_slow=True),
        Item(slower, "t1", is_slow=True),
    ]
    items += [Item(Path("test_helm_chart.py"), "h0"), Item(Path("test_helm_chart.py"), "h1")]
    longest_files_first(items)
    assert [item.name for item in items] == ["t0", "t1", "h0", "h1", "s0", "s1", *(f"m{i}" for i in range(50))]
