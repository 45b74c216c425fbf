"""Threads of ranks wait as the user says, and otherwise do not keep cores from each other."""

from __future__ import annotations

import pytest

from gemray_workers.rank.waiting_threads import waiting_threads


@pytest.mark.parametrize(
    ("said", "given"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"OMP_NUM_THREADS": "4"}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_what_the_user_has_set_stays(said: dict[str, str], given: dict[str, str]) -> None:
    assert waiting_threads(said) == given
