"""How much of a device's memory KV pages get when nobody states it: the arithmetic, and the ranks' agreement.

On a card a rank has tried out its largest step and its largest graphs by then, over small pools (`rank.rehearsal`).
Two limits hold, and the smaller room counts:

- the process's own: all that it takes is at most `gpu_memory_utilization` of the card. Only its own memory counts here,
  so of two servers on a card each may be given a part;
- the card's: what is free now, less 1/32 of the card. So a server that comes second takes what the first one left.

On a CPU, where everything on the host shares the memory, the ranks of a gang there get a quarter of what is free.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Protocol

import torch

from gemray_workers.config import EngineConfig, KVMemory
from gemray_workers.errors import CapacityError
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.memory import gib

logger = logging.getLogger(__name__)

SEGMENT = 2 << 20
"""An allocation on a card is rounded up to a multiple of it."""
LEAST_HEADROOM = 32
"""One part in so many of a card is left free, whatever its share: for what is allocated later, by us or by CUDA."""
HOST_SHARE = 4
"""On a CPU one part in so many of what is free is taken."""
USEFUL_LEN = 128
"""A server whose requests have less room than this, where more was asked for, is none."""
_SHORT_CHUNK = 64
"""Prompt rows a step that suffice where memory is short."""
TOLERANCE = 100
"""A gang that finds at most one part in so many less than the one before it had takes as much: the headroom has it."""


@dataclass(frozen=True)
class KVRoom:
    """What one rank can give to KV pages, and where the rest of its device's memory is; bytes."""

    num_bytes: int
    """Not positive where everything else already takes too much."""
    total: int
    """All of the device."""
    free: int
    """What the process could have in all, weights included, when it was measured."""
    weights: int
    drafter: int
    work: int
    graphs: int
    outside: int
    """The process's memory that is not its allocator's."""

    @property
    def held(self) -> int:
        """What the process has or will have beside KV pages."""
        return self.weights + self.drafter + self.work + self.graphs


def card_room(
    *,
    total: int,
    free: int,
    outside: int,
    weights: int,
    drafter: int,
    work: int,
    graphs: int,
    utilization: float,
    num_tensors: int,
) -> KVRoom:
    """The room on a card.

    Args:
        total: bytes of the card.
        free: what is free, and what the process's allocator holds: all that can be distributed.
        outside: what the process has taken beside its allocator.
        weights: of the target.
        drafter: weights of the drafters.
        work: of the largest step.
        graphs: all of them, captured or not.
        utilization: the part of the card that the process may take.
        num_tensors: that the pages will lie in; each may be rounded up.
    """
    held = weights + drafter + work + graphs + num_tensors * SEGMENT
    of_share = int(total * utilization) - outside - held
    of_free = free - total // LEAST_HEADROOM - held
    return KVRoom(min(of_share, of_free), total, free, weights, drafter, work, graphs, outside)


def host_room(*, total: int, free: int, weights: int, drafter: int, ranks_here: int) -> KVRoom:
    """The room on a CPU for each of `ranks_here` ranks of a gang on one host, once all have their weights.

    Args:
        total: bytes of the host or of the control group.
        free: what is free of it.
        weights: of the target, which are there already.
        drafter: weights of the drafters.
        ranks_here: ranks that measure the same memory.
    """
    return KVRoom(free // HOST_SHARE // ranks_here, total, free, weights, drafter, work=0, graphs=0, outside=0)


class PoolOwner(Protocol):
    """A rank, of the target or of a dedicated drafter, whose pools have no size yet."""

    def kv_room(self, ranks_here: int) -> KVRoom:
        """What it can give to KV pages; all ranks of the gang are asked at the same time."""
        ...

    def size_pools(self, blueprint: Blueprint) -> None:
        """Make its pools those of the blueprint."""
        ...


def find_kv_memory(rank: PoolOwner, gang: Communicator, config: EngineConfig, *, ranks_here: int = 1) -> None:
    """Measure, agree with all ranks of the gang, and give the rank's pools their size.

    Raises:
        CapacityError: there is too little memory, or it is gone when the pools take it.
    """
    mine = rank.kv_room(ranks_here)
    logger.info(
        "room for %s of KV pages: of %s that the rank can have weights take %s, drafters %s, work space %s, graphs %s",
        *map(gib, (mine.num_bytes, mine.free, mine.weights, mine.drafter, mine.work, mine.graphs)),
    )
    rooms = exchange(mine, gang)
    kv = settle(rooms, config.tensor_parallel_size, config.most_kv_memory)
    drawn = draw(config, kv, rooms)
    _tell(config, kv, drawn)
    rank.size_pools(drawn)


def _tell(config: EngineConfig, kv: KVMemory, drawn: Blueprint) -> None:
    """Warn where pools are smaller than those of the gang before; often they need less than was found."""
    most = config.most_kv_memory
    if most is not None and drawn.pools != Blueprint.of(config, most).pools:
        logger.warning(
            "KV memory is %s a rank, the gang before had %s: requests of its longest lengths may not fit any more",
            gib(kv.target), gib(most.target),
        )  # fmt: skip


def exchange(mine: KVRoom, gang: Communicator) -> list[KVRoom]:
    """Every rank's room, in rank order. It is measured everywhere before anyone takes it."""
    numbers = torch.tensor(astuple(mine), dtype=torch.int64)
    return [KVRoom(*row) for row in gang.all_gather(numbers).tolist()]


def settle(rooms: Sequence[KVRoom], num_target_ranks: int, most: KVMemory | None = None) -> KVMemory:
    """What all ranks take: the least of the target's ranks, and what a dedicated drafter's rank has.

    Args:
        rooms: in rank order; a dedicated drafter's is the last.
        num_target_ranks: how many of them are the target's.
        most: what an earlier gang found.
    """
    target = min(room.num_bytes for room in rooms[:num_target_ranks])
    drafter = rooms[-1].num_bytes if len(rooms) > num_target_ranks else target
    if most is None:
        return KVMemory(target, drafter)
    return KVMemory(_at_most(target, most.target), _at_most(drafter, most.drafter))


def _at_most(found: int, most: int) -> int:
    return most if found >= most - most // TOLERANCE else found


def draw(config: EngineConfig, kv: KVMemory, rooms: Sequence[KVRoom]) -> Blueprint:
    """The gang's blueprint with the KV memory that was found.

    Raises:
        CapacityError: it holds no request of a useful length; a sentence with the tightest rank's figures and what
            would fit.
    """
    drawn = _fitting(config, kv)
    if drawn is not None:
        return drawn
    rank = min(range(len(rooms)), key=lambda rank: rooms[rank].num_bytes)
    room = rooms[rank]
    beside = room.free - room.held - room.num_bytes
    raise CapacityError(
        f"rank {rank} has no memory for KV pages: of {gib(room.total)} it can have {gib(room.free)}, of which "
        f"weights take {gib(room.weights)}, drafters {gib(room.drafter)}, the work space of the largest step "
        f"{gib(room.work)} and graphs {gib(room.graphs)}, and {gib(beside)} are to stay free; "
        f"{_remedy(config, room)}"
    )


def _fitting(config: EngineConfig, kv: KVMemory) -> Blueprint | None:
    """The blueprint, if a request of a useful length has room in it."""
    if min(kv.target, kv.drafter) <= 0:
        return None
    try:
        drawn = Blueprint.of(config, kv)
    except CapacityError:
        return None
    return drawn if drawn.pools.max_model_len >= min(drawn.requested_len, USEFUL_LEN) else None


def _remedy(config: EngineConfig, room: KVRoom) -> str:
    """What would fit, as far as it can be told: work space grows with a step's rows, graphs with the batch."""
    scheduler = Blueprint.of(config).scheduler
    rows_each, rows = 1 + scheduler.num_draft_tokens, scheduler.max_step_tokens
    chunk = min(scheduler.prefill_chunk, _SHORT_CHUNK)
    num_seqs = config.max_num_seqs
    while num_seqs:
        fewer_rows = num_seqs * rows_each + chunk
        saved = room.work * max(0, rows - fewer_rows) // rows
        saved += room.graphs * (config.max_num_seqs - num_seqs) // config.max_num_seqs
        fewer = replace(config, max_num_seqs=num_seqs, max_step_tokens=fewer_rows, prefill_chunk=chunk)
        drawn = _fitting(fewer, KVMemory(room.num_bytes + saved, room.num_bytes + saved))
        if drawn is not None:
            return (
                f"max_num_seqs = {num_seqs}, max_step_tokens = {fewer_rows} and prefill_chunk = {chunk} should fit, "
                f"with requests of up to about {drawn.pools.max_model_len} tokens"
            )
        num_seqs //= 2
    if room.free - room.held > room.total // LEAST_HEADROOM:
        return "raise gpu_memory_utilization, raise tp, or take a smaller model"
    return "give other processes on the card less, raise tp, or take a smaller model"
