"""From launched processes to loaded ranks: who they are, where they meet, and what each holds."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

from gemray_cluster.gang.client import GangUnavailable
from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.diagnosis import errors_by_cause, in_words, require_same_versions, same_model
from gemray_cluster.gang.laps import Laps
from gemray_cluster.gang.launcher import ProgressListener, Rank, RankDied, StartProgress
from gemray_cluster.gang.lifeline import Lifeline
from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_workers.channel import GangChannel
from gemray_workers.config import EngineConfig
from gemray_workers.errors import GemrayError
from gemray_workers.messages import GangInfo, ModelInfo, RankInfo
from gemray_workers.rank.process import RankFacts, RankSetup
from gemray_workers.rank.worker import RankWorker

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
MAX_THREADS_BESIDE_GPU = 8
DIAGNOSIS_S = 1.0
"""After a first sign of failure: how long to wait for the ranks' own errors, which tell cause from consequence."""


class BringUp:
    """The ranks of one gang on their way to being loaded."""

    def __init__(
        self, ranks: Sequence[Rank], config: ClusterConfig, engine: EngineConfig, progress: ProgressListener, laps: Laps
    ) -> None:
        """Call no rank yet.

        Args:
            ranks: in rank order.
            config: threads of a rank.
            engine: the device that the ranks have, and where their checkpoints are.
            progress: told as ranks get ready.
            laps: what the parts of the start take.
        """
        self._ranks = ranks
        self._config = config
        self._engine = engine
        self._progress = progress
        self._laps = laps
        self._facts: list[RankFacts] = []

    @property
    def facts(self) -> list[RankFacts]:
        """Those of all ranks once they have met; none before that."""
        return self._facts

    async def meet(self) -> None:
        """Wait until every process is up. Raises `GangUnavailable` when one died or the ranks' software differs."""
        self._facts = await _all("start", [rank.call(RankWorker.facts) for rank in self._ranks])
        require_same_versions(self._facts)
        self._laps.end("processes")
        self._progress(StartProgress("processes", len(self._ranks), len(self._ranks)))

    async def agree(self, served: ServedCheckpoints) -> None:
        """Compare the checkpoints of every rank's node with those of earlier gangs. Raises CheckpointError."""
        found = await _all("read the checkpoint", [rank.call(RankWorker.checkpoints) for rank in self._ranks])
        for fact, checkpoints in zip(self._facts, found, strict=True):
            served.require(checkpoints, self._engine, fact.host)

    def open_channel(self, here: tuple[str, str]) -> GangChannel:
        """Listen where rank 0 reaches this side, which is at `here`: (node id, node ip)."""
        node_id, node_ip = here
        return GangChannel(LOOPBACK if self._facts[0].node_id == node_id else node_ip)

    async def tie(self, here: tuple[str, str]) -> Lifeline:
        """Let every rank end with this side, which is at `here`. Raises what keeps a rank from reaching it."""
        node_id, node_ip = here
        all_here = {fact.node_id for fact in self._facts} == {node_id}
        lifeline = Lifeline(LOOPBACK if all_here else node_ip, len(self._ranks))
        try:
            tie = RankWorker.end_with_coordinator
            await _all("reach the coordinator", [r.call(tie, lifeline.host, lifeline.port) for r in self._ranks])
        except BaseException:
            lifeline.close()
            raise
        return lifeline

    async def load(self) -> GangInfo:
        """Let all ranks join and load. Raises what a rank found wrong, or `GangUnavailable`."""
        one_node = len({fact.node_id for fact in self._facts}) == 1
        meeting_ip = LOOPBACK if one_node else self._facts[0].node_ip
        rendezvous = await self._ranks[0].call(RankWorker.open_rendezvous, meeting_ip)
        setups = [
            RankSetup(
                rendezvous=rendezvous,
                interface_ip=LOOPBACK if one_node else fact.node_ip,
                threads=self._threads(fact),
                ranks_here=self._ranks_at(fact),
            )
            for fact in self._facts
        ]
        total, loaded = len(self._ranks), 0

        async def load(rank: Rank, setup: RankSetup) -> tuple[ModelInfo, RankInfo]:
            nonlocal loaded
            parts = await rank.call(RankWorker.load, setup)
            loaded += 1
            self._progress(StartProgress("load", loaded, total, f"(ready on {parts[1].host}, {parts[1].device})"))
            return parts

        self._progress(StartProgress("load", 0, total))
        parts = await _all("load", [load(*pair) for pair in zip(self._ranks, setups, strict=True)])
        self._laps.end("load and warm-up")
        return GangInfo(model=same_model([model for model, _ in parts]), ranks=[rank for _, rank in parts])

    def _threads(self, fact: RankFacts) -> int:
        if self._config.threads_per_rank is not None:
            return self._config.threads_per_rank
        asked = os.environ.get("OMP_NUM_THREADS", "")
        if asked.isdecimal() and int(asked) > 0:
            return int(asked)
        share = max(1, fact.cores // self._ranks_at(fact))
        return min(share, MAX_THREADS_BESIDE_GPU) if self._engine.device == "cuda" else share

    def _ranks_at(self, fact: RankFacts) -> int:
        return Counter(f.node_id for f in self._facts)[fact.node_id]


async def _all(doing: str, calls: Iterable[Awaitable[T]]) -> list[T]:
    """Every rank's answer; at the first error, the error that caused the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if all(task.exception() is None for task in done):
            return [task.result() for task in tasks]
        await asyncio.wait(tasks, timeout=DIAGNOSIS_S)
        rank, cause = errors_by_cause(tasks)[0]
        if isinstance(cause, GemrayError) and not isinstance(cause, RankDied):
            raise cause
        raise GangUnavailable(f"rank {rank} failed to {doing}: {in_words(cause)}") from cause
    finally:
        for task in tasks:
            task.cancel()
