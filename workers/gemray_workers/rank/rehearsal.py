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

import torch

from gemray_workers.engine.graphs import GraphedCycle
from gemray_workers.errors import CapacityError
from gemray_workers.rank.card_memory import CardMemory
from gemray_workers.rank.kv_room import KVRoom, card_room


@dataclass(frozen=True)
class GraphSample:
    """The largest graphs, captured to learn what all of them take."""

    graphs: GraphedCycle
    """Holds them: their memory is there as long as this is."""
    num_captured: int
    num_all: int
    bytes_of_others: int
    """What the others keep for themselves in the memory that all share: their outputs."""


@dataclass(frozen=True)
class PresentBytes:
    """What a rank holds while it rehearses."""

    weights: int
    drafter: int
    pools: int
    num_pool_tensors: int


def rehearse(
    card: CardMemory,
    present: PresentBytes,
    *,
    utilization: float,
    run: Callable[[], None],
    capture: Callable[[], GraphSample | None],
) -> KVRoom:
    """Run and capture what takes the most memory, and tell what room that leaves for KV pages.

    Args:
        card: the rank's.
        present: loaded weights and small pools.
        utilization: the part of the card that the process may take.
        run: the largest step, kernel by kernel.
        capture: the largest graphs; gives None where cycles are not captured.
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
        graphs=_graph_bytes(card, free, reserved, capture),
        utilization=utilization,
        num_tensors=present.num_pool_tensors,
    )


def _graph_bytes(card: CardMemory, free: int, reserved: int, capture: Callable[[], GraphSample | None]) -> int:
    """What all graphs will take: the sample's part of the allocator's memory and the others' outputs there, and the
    driver's memory for each graph.
    """
    sample = capture()
    if sample is None:
        return 0
    card.give_back()
    pool = max(0, card.reserved() - reserved)
    drivers = max(0, free - card.free() - pool)
    return pool + sample.bytes_of_others + drivers * sample.num_all // sample.num_captured


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
