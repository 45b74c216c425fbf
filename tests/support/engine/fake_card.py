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
        return self.total - self.others - self.own_outside - self.reserved()

    def reserved(self) -> int:
        return self.in_use + self._kept

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
