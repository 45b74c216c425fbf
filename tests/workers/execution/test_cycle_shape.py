"""What the host knows of a cycle's rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from gemray_workers.execution.cycle_rows import CyclePlan
from gemray_workers.sampling.features import Features
from gemray_workers.scheduling.plan import ScheduledRows


class Greedy:
    """Stands for the sampling state of greedy requests."""

    def features_of(self, slots: Iterable[int]) -> Features:
        return Features()


def rows(slot: int, start: int, num_known: int, num_drafts: int = 0) -> ScheduledRows:
    return ScheduledRows(slot=slot, start=start, num_known=num_known, num_drafts=num_drafts, samples=True)


@pytest.mark.parametrize(
    ("scheduled", "most_keys"),
    [
        ([rows(0, 900, 1, 4), rows(1, 64, 32)], 0),
        ([rows(0, 900, 1, 4), rows(1, 64, 33)], 97),
        ([rows(0, 0, 50), rows(1, 64, 40, 2), rows(2, 3, 60)], 106),
        ([rows(0, 900, 1, 32), rows(1, 64, 33)], None),  # where a sequence that decodes stands, the device knows
    ],
)
def test_keys_of_prompts_are_known(scheduled: list[ScheduledRows], most_keys: int | None) -> None:
    shape = CyclePlan.of(scheduled, Greedy()).shape  # type: ignore[arg-type]
    assert shape.most_keys == most_keys
    assert shape == replace(shape, most_keys=7), "cycles are captured and found by what else they have"
