"""One line that says where a start's time went."""

from __future__ import annotations

from gemray_cluster.gang.laps import Laps


def test_parts_add_up_to_the_whole() -> None:
    clock = iter([100.0, 100.5, 107.5, 112.5])
    laps = Laps(lambda: next(clock))
    for name in ("placement", "processes", "load and warm-up"):
        laps.end(name)
    assert str(laps) == "12.5 s: placement 0.5, processes 7.0, load and warm-up 5.0"
