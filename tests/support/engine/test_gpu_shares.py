"""Workers of pytest-xdist begin with different cards, and are as many as have room."""

from __future__ import annotations

import pytest

from support.engine.gpu_shares import cards_of_worker, num_workers, spread

GIB = 1 << 30


def test_each_worker_begins_with_the_next_card() -> None:
    seen = [",".join(cards_of_worker(["4", "5", "GPU-ab"], f"gw{i}")) for i in range(4)]
    assert seen == ["4,5,GPU-ab", "5,GPU-ab,4", "GPU-ab,4,5", "4,5,GPU-ab"]
    assert cards_of_worker([], "gw3") == []


@pytest.mark.parametrize(
    ("cards", "cores", "workers"),
    [
        ([141 * GIB] * 2, 32, 16),
        ([141 * GIB] * 2, 64, 16),
        ([141 * GIB], 16, 8),
        ([80 * GIB], 64, 5),
        ([15 * GIB], 64, 1),
        ([], 64, 1),
        ([80 * GIB], 1, 1),
    ],
)
def test_workers_have_memory_and_cores(cards: list[int], cores: int, workers: int) -> None:
    assert num_workers(cards, cores) == workers


@pytest.mark.parametrize(
    ("gangs", "others", "order"),
    [("AB", "abcde", "AabBcde"), ("ABC", "a", "ABCa"), ("", "abc", "abc"), ("AB", "", "AB"), ("A", "abc", "Aabc")],
)
def test_tests_of_gangs_lie_evenly_among_the_others(gangs: str, others: str, order: str) -> None:
    assert "".join(spread(gangs, others)) == order
