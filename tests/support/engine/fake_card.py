"""A card's memory without a card: what a rank on CPU holds stands in for what the allocator would."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemray_workers.rank.drafter_rank import DrafterRank
from gemray_workers.rank.target_rank import EngineRank

MIB = 1 << 20


@dataclass
class FakeCard:
    """A `CardMemory` on which a step's work space stays with the allocator until it is given back."""

    total: int
    work: int = 0
    """What the largest step takes."""
    others: int = 0
    """What other processes hold."""
    own_outside: int = 0
    """What this process holds beside the allocator."""
    rank: EngineRank | DrafterRank | None = None
    """Whose memory it is, once it has loaded."""
    calls: list[str] = field(default_factory=list)
    graph_bytes: int = 0
    """What captured graphs keep of the allocator's memory."""
    driver_bytes: int = 0
    """What the driver keeps for them."""
    _kept: int = 0

    @property
    def in_use(self) -> int:
        """What the rank's tensors take."""
        rank = self.rank
        if rank is None:
            return 0
        if isinstance(rank, DrafterRank):
            return rank._table_bytes + rank._drafter.weight_bytes + rank._pools.num_bytes
        pools = sum(pools.num_bytes for pools in rank._all_pools)
        return rank._model.weight_bytes + rank._drafter.weight_bytes + pools

    def free(self) -> int:
        return self.total - self.others - self.own_outside - self.driver_bytes - self.reserved()

    def reserved(self) -> int:
        return self.in_use + self.graph_bytes + self._kept

    def peak(self) -> int:
        self.calls.append(f"peak with {self.in_use} in use")
        self._kept = self.work
        return self.in_use + self.work

    def restart_peak(self) -> None:
        self.calls.append("restart")

    def give_back(self) -> None:
        self.calls.append(f"give back with {self.in_use} in use")
        self._kept = 0

    def outside(self) -> int:
        return self.own_outside


class FakeGraphs:
    """Buckets of so many kinds, largest first, over a made-up card: the first of each kind takes a pool, kernels are
    loaded once, each costs the driver as much as any other."""

    num_kinds = 2

    def __init__(self, card: FakeCard, num_all: int, *, pool: int, driver: int, kernels: int) -> None:
        self._card, self._num_all = card, num_all
        self._pool, self._driver, self._kernels = pool, driver, kernels
        self.num_captured = 0

    def capture_some(self, first: int, count: int) -> int:
        assert first == self.num_captured
        count = min(count, self._num_all - first)
        for i in range(first, first + count):
            self._card.graph_bytes += self._pool * (i < self.num_kinds)
            self._card.driver_bytes += self._driver + self._kernels * (i == 0)
            self._card._kept += 1000  # of the eager run, until it is given back
        self.num_captured += count
        return count
