"""KV memory that gangs find by themselves: what the first one found bounds those that follow."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from gemray_workers.config import EngineConfig, KVMemory
from gemray_workers.messages import GangInfo, MemoryInfo, RankInfo

logger = logging.getLogger(__name__)
GIB = 1 << 30


class FoundMemory:
    """Settings of one gang after the other. Requests that were accepted under one are replayed in the next, and clients
    have been told how long a request may be: so that does not grow and shrink from failure to failure.
    """

    def __init__(self, engine: EngineConfig) -> None:
        """With the settings of the first gang."""
        self._engine = engine
        self._first: KVMemory | None = None

    def next_engine(self, infos: Iterable[GangInfo]) -> EngineConfig:
        """Settings for another gang.

        Args:
            infos: of gangs that have served, in place of which or beside which it comes.
        """
        if self._engine.kv_memory_bytes is not None:
            return self._engine
        if self._first is None:
            self._first = _least([found for found in map(_found_by, infos) if found is not None])
        return replace(self._engine, most_kv_memory=self._first)


def _least(found: list[KVMemory]) -> KVMemory | None:
    if not found:
        return None
    return KVMemory(min(kv.target for kv in found), min(kv.drafter for kv in found))


def _found_by(info: GangInfo) -> KVMemory | None:
    budgets = {rank.role: rank.memory.kv_budget for rank in info.ranks if rank.memory is not None}
    if "target" not in budgets:
        return None
    return KVMemory(budgets["target"], budgets.get("drafter", budgets["target"]))


def tell_memory(info: GangInfo, gang: str) -> None:
    """Log a line for each rank of the gang of that name: where its device's memory is."""
    for rank in info.ranks:
        if rank.memory is not None:
            logger.info("%s: %s", gang, memory_line(rank, rank.memory))


def memory_line(rank: RankInfo, memory: MemoryInfo) -> str:
    """One rank's memory in words."""
    groups = ", ".join(f"{group.name} {_gib(group.num_pages * group.page_bytes)}" for group in rank.kv_groups)
    parts = {
        "weights": memory.weights,
        "drafter": memory.drafter,
        f"KV pages ({groups})": memory.kv,
        "graphs": memory.graphs,
        "work space": memory.work,
        "elsewhere": memory.elsewhere,
        "headroom": memory.headroom,
    }
    told = "; ".join(f"{what} {_gib(num_bytes)}" for what, num_bytes in parts.items())
    return f"memory of rank {rank.rank} ({rank.device} on {rank.host}), {_gib(memory.total)} GiB in all: {told}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"
