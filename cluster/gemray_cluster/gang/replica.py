"""One of the gangs that serve the same model under one server."""

from __future__ import annotations

from dataclasses import dataclass

from gemray_cluster.gang.client import GangState, ReplicaStatus
from gemray_cluster.gang.prefix_affinity import RememberedPrefixes
from gemray_cluster.gang.supervisor import SupervisedGang, Supervisor
from gemray_cluster.gang.together import counts_of_gone, total_stats
from gemray_workers.messages import EngineStats, GangInfo


@dataclass(frozen=True)
class Past:
    """What earlier replicas of the same index did: series of one index never go back."""

    num_rebuilds: int = 0
    stats: EngineStats | None = None
    """Counts alone."""


class Replica:
    """A supervised gang and what the router knows of it."""

    def __init__(self, index: int, supervisor: Supervisor, past: Past) -> None:
        """Given nothing yet.

        Args:
            index: a small number, used again once the replica is gone.
            supervisor: keeps its gang.
            past: of those that had the index before.
        """
        self.index = index
        self.supervisor = supervisor
        self._past = past
        self.is_retiring = False
        """Whether it is given no more requests and ends with its last one."""
        self.num_live = 0
        self.has_suspect = False
        """Whether it runs a request that may be what kills gangs, and that has not got a token since."""
        self.given_at = 0
        """Place of its newest request in the order of all requests."""
        self._remembered_of: SupervisedGang | None = None
        self._remembered = RememberedPrefixes()

    @property
    def takes_requests(self) -> bool:
        """Whether a request can be given to it now."""
        return self.supervisor.state is GangState.SERVING and not self.is_retiring

    @property
    def num_waiting(self) -> int:
        """Requests that waited for a slot or pages at its engine's newest step."""
        stats = self.supervisor.stats
        return 0 if stats is None else stats.num_waiting

    @property
    def prefixes(self) -> RememberedPrefixes:
        """What its gang of the moment has computed: a new gang has computed nothing."""
        gang = self.supervisor.serving_gang()
        if gang is not self._remembered_of:
            self._remembered_of, self._remembered = gang, RememberedPrefixes()
        return self._remembered

    @property
    def info(self) -> GangInfo | None:
        """The model and its shards; None before it has served."""
        return self.supervisor.info

    @property
    def stats(self) -> EngineStats | None:
        """Counts of all that had its index, and what its gang of the moment holds; None before the first step."""
        return total_stats([self._past.stats, self.supervisor.stats])

    @property
    def num_rebuilds(self) -> int:
        """Gangs that served after another had failed, under its index."""
        return self._past.num_rebuilds + self.supervisor.num_rebuilds

    def past(self) -> Past:
        """What is left once it is gone."""
        return Past(self.num_rebuilds, counts_of_gone(self.stats))

    def status(self) -> ReplicaStatus:
        """How it stands now."""
        supervisor = self.supervisor
        state = supervisor.state
        return ReplicaStatus(
            index=self.index,
            state=GangState.DRAINING if self.is_retiring and state is GangState.SERVING else state,
            failure=supervisor.failure,
            num_live=self.num_live,
            num_rebuilds=self.num_rebuilds,
            seconds_since_heartbeat=supervisor.seconds_since_heartbeat,
            stats=self.stats,
            info=self.info,
        )
