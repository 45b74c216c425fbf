"""How many replicas a load asks for, and what limits may say."""

from __future__ import annotations

from typing import Any

import pytest

from gemray_cluster.gang.scaling import ReplicaLimits, Scaling
from gemray_workers.errors import InvalidField


@pytest.mark.parametrize(
    ("given", "least", "at_start", "most"),
    [
        ({}, 1, 1, 1),
        ({"replicas": 3}, 3, 3, 3),
        ({"max_replicas": 4}, 1, 1, 4),
        ({"min_replicas": 2, "max_replicas": 4}, 2, 2, 4),
        ({"replicas": 2, "max_replicas": 4}, 2, 2, 4),
        ({"replicas": 2, "min_replicas": 1}, 1, 2, 2),
    ],
)
def test_what_is_unset_follows_from_the_rest(given: dict[str, int], least: int, at_start: int, most: int) -> None:
    limits = ReplicaLimits(**given)
    assert (limits.least, limits.at_start, limits.most) == (least, at_start, most)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": 2, "min_replicas": 3}, "min_replicas"),
        ({"replicas": 2, "max_replicas": 1}, "max_replicas"),
        ({"min_replicas": 2, "max_replicas": 1}, "max_replicas"),
        ({"scale_up_s": 0.0}, "scale_up_s"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        ReplicaLimits(**given)
    assert caught.value.field == field


def changes(scaling: Scaling, loads: list[tuple[float, int, int]], slots: int = 10) -> list[int]:
    """What each look at (now, replicas, live requests) asks for."""
    return [scaling.change(now=now, replicas=r, num_live=live, slots=slots) for now, r, live in loads]


def scaling() -> Scaling:
    return Scaling(ReplicaLimits(min_replicas=1, max_replicas=3, scale_up_s=10, scale_down_s=100))


def test_requests_must_wait_for_a_while_before_a_replica_is_added() -> None:
    assert changes(scaling(), [(0, 1, 11), (9, 1, 11), (10, 1, 11), (11, 1, 11), (20, 1, 11), (21, 1, 11)]) == [
        0, 0, 1, 0, 0, 1,
    ]  # fmt: skip


def test_a_moment_without_a_queue_begins_the_wait_again() -> None:
    assert changes(scaling(), [(0, 1, 11), (9, 1, 10), (10, 1, 11), (19, 1, 11), (20, 1, 11)]) == [0, 0, 0, 0, 1]


def test_a_replica_goes_when_the_others_have_room_to_spare() -> None:
    assert changes(scaling(), [(0, 3, 10), (99, 3, 10), (100, 3, 10)]) == [0, 0, -1]
    assert changes(scaling(), [(0, 3, 11), (1000, 3, 11)]) == [0, 0], "11 of the 20 slots that would be left"


def test_the_limits_hold() -> None:
    assert changes(scaling(), [(0, 3, 999), (1000, 3, 999)]) == [0, 0]
    assert changes(scaling(), [(0, 1, 0), (1000, 1, 0)]) == [0, 0]
    assert changes(scaling(), [(0, 0, 999), (1000, 0, 999)]) == [0, 0], "none serves: they are being rebuilt"
