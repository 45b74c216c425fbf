"""Which requests wait in one replica while another one has a slot for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gemray_cluster.gang.replay import Move
from gemray_cluster.gang.replica import Replica
from gemray_cluster.gang.supervisor import SupervisedGang


@dataclass(eq=False)
class Routed:
    """A request and the replica that it counts for."""

    keys: Sequence[bytes]
    """Keys of its prompt's blocks."""
    replica: Replica
    given: int = 0
    """Its place in the order in which replicas were given requests."""
    move: Move[SupervisedGang] = field(default_factory=Move)


def moves(requests: Iterable[Routed], replicas: Sequence[Replica], slots: int) -> list[tuple[Routed, Replica]]:
    """Requests that wait, each with the replica where it gets a slot. From each replica the newest go: its engine takes
    requests in their order, so they would wait longest.

    Args:
        requests: those that have not ended.
        replicas: those that take requests.
        slots: requests that one runs at a time.
    """
    movable = sorted((request for request in requests if request.move.is_possible), key=lambda request: request.given)
    live = {replica: replica.num_live for replica in (*replicas, *(request.replica for request in movable))}
    waiting = {replica: max(count - slots, replica.num_waiting) for replica, count in live.items()}
    targets = [replica for replica in replicas if waiting[replica] <= 0 and not replica.has_suspect]
    found: list[tuple[Routed, Replica]] = []
    while movable and targets:
        request, target = movable.pop(), min(targets, key=lambda replica: live[replica])
        source = request.replica
        # One fewer there and one more here must not be the same the other way round: it would go back.
        if waiting[source] > 0 and live[target] < slots and live[source] - live[target] > 1:
            live[source], live[target], waiting[source] = live[source] - 1, live[target] + 1, waiting[source] - 1
            found.append((request, target))
    return found
