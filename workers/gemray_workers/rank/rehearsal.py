"""The largest step that a gang may have to run, tried out on a card before KV memory is given out.

Graphs hold the addresses of the pools that they were captured over, so the pools must be there first; but what graphs
and work space take is only known once they ran. So a rank first gets pools for a few short sequences. Over these it
runs the largest batch with everything that a request may ask for, and captures the largest graphs; the allocator's
figures tell what to keep for them. Then these graphs and pools go, the real pools take their place in the same caches,
and all graphs are captured over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from gemray_workers.errors import CapacityError
from gemray_workers.rank.card_memory import CardMemory
from gemray_workers.rank.kv_room import KVRoom, card_room, host_room
from gemray_workers.rank.memory import free_bytes, total_bytes


class Graphs(Protocol):
    """Cycles of many shapes, to be captured: see `GraphedCycle`, which is one."""

    @property
    def num_kinds(self) -> int:
        """As there."""
        ...

    def capture_some(self, first: int, count: int) -> int:
        """As there."""
        ...


@dataclass(frozen=True)
class GraphsToCapture:
    """What a start will capture."""

    graphs: Graphs
    """Nothing captured yet. Memory of what is captured is there as long as this is."""
    num_all: int
    """Buckets that the start captures; 0 where each is captured at its first use, for measurements of a few."""


@dataclass(frozen=True)
class PresentBytes:
    """What a rank holds while it rehearses."""

    weights: int
    drafter: int
    pools: int
    num_pool_tensors: int


def find_room(
    card: CardMemory | None,
    device: torch.device,
    present: PresentBytes,
    *,
    place: str,
    remedy: str,
    utilization: float,
    ranks_here: int,
    run: Callable[[], None],
    graphs: Callable[[], GraphsToCapture | None],
) -> KVRoom:
    """What a rank can give to KV pages: on a card found by rehearsing, else its share of what is free on the host.

    Args:
        card: the rank's; None on a CPU.
        device: of the rank.
        present: loaded weights and small pools.
        place: the rank, its device and host.
        remedy: what to do where the largest step does not fit.
        utilization: the part of the card that the process may take.
        ranks_here: ranks of the gang on this host, which on a CPU share what is free.
        run: the largest step, kernel by kernel.
        graphs: makes those that a start captures; gives None where cycles run kernel by kernel.

    Raises:
        CapacityError: the card cannot even hold the largest step.
    """
    if card is None:
        return host_room(
            total=total_bytes(device),
            free=free_bytes(device),
            weights=present.weights,
            drafter=present.drafter,
            ranks_here=ranks_here,
        )
    with told_as_capacity(place, f"while it tried out its largest step: {remedy}"):
        return rehearse(card, present, utilization=utilization, run=run, graphs=graphs)


def rehearse(
    card: CardMemory,
    present: PresentBytes,
    *,
    utilization: float,
    run: Callable[[], None],
    graphs: Callable[[], GraphsToCapture | None],
) -> KVRoom:
    """Run and capture what takes the most memory, and tell what room that leaves for KV pages.

    Args:
        card: the rank's.
        present: loaded weights and small pools.
        utilization: the part of the card that the process may take.
        run: the largest step, kernel by kernel.
        graphs: makes those that a start captures; gives None where cycles run kernel by kernel.
    """
    card.give_back()
    card.restart_peak()
    run()
    work = card.peak() - present.pools - present.weights - present.drafter
    card.give_back()
    free, reserved, outside = card.free(), card.reserved(), card.outside()
    return card_room(
        total=card.total,
        free=free + reserved,
        outside=outside,
        weights=present.weights,
        drafter=present.drafter,
        work=max(0, work),
        graphs=_graph_bytes(card, free, reserved, graphs()),
        utilization=utilization,
        num_tensors=present.num_pool_tensors,
    )


def _graph_bytes(card: CardMemory, free: int, reserved: int, found: GraphsToCapture | None) -> int:
    """What all graphs will take, from two rounds of captures.

    The first captures the largest graph of each kind. It takes what the others share, and loads kernels. The second
    captures the next ones: what they take beside the allocator's memory is the driver's for each further graph.

    Args:
        card: of the rank.
        free: bytes of the card before.
        reserved: bytes of the allocator before.
        found: what is to be captured, if anything is.
    """
    if found is None:
        return 0
    graphs = found.graphs
    num_first = graphs.capture_some(0, graphs.num_kinds)
    card.give_back()
    taken = max(0, free - card.free())
    if not found.num_all:
        return taken
    pool = max(0, card.reserved() - reserved)
    num_next = graphs.capture_some(num_first, graphs.num_kinds)
    num_captured = num_first + num_next
    card.give_back()
    taken_next = max(0, free - card.free() - taken)
    pool_next = max(0, card.reserved() - reserved - pool)
    drivers = max(0, taken_next - pool_next) * (found.num_all - num_captured) // max(1, num_next)
    return taken + taken_next + drivers


@contextmanager
def told_as_capacity(place: str, doing: str) -> Iterator[None]:
    """Turn an allocator's error into a CapacityError: whose memory was too small, and for what.

    Args:
        place: the rank, its device and host.
        doing: what the memory was for, and what to do about it.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(f"{place} ran out of memory {doing}: {str(error).splitlines()[0]}") from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise CapacityError(f"{place} ran out of memory {doing}") from error
