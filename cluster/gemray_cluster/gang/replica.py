"""One of the gangs that serve the same model under one server."""

from __future__ import annotations

from dataclasses import dataclass

from gemray_cluster.gang.client import GangState
from gemray_cluster.gang.prefix_affinity import RememberedPrefixes
from gemray_cluster.gang.supervisor import SupervisedGang, Supervisor
from gemray_workers.messages import EngineStats, GangInfo


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """How a replica stands, for those who watch."""

    index: int
    state: GangState
    failure: str | None
    num_live: int
    """Requests that it was given and that have not ended."""
    num_rebuilds: int
    seconds_since_heartbeat: float
    stats: EngineStats | None
    info: GangInfo | None
    """None before it has served."""


class Replica:
    """A supervised gang and what the router knows of it."""

    def __init__(self, index: int, supervisor: Supervisor) -> None:
        """Given nothing yet.

        Args:
            index: a small number, used again once the replica is gone.
            supervisor: keeps its gang.
        """
        self.index = index
        self.supervisor = supervisor
        self.is_retiring = False
        """Whether it is given no more requests and ends with its last one."""
        self.num_live = 0
        self.given_at = 0
        """Place of its newest request in the order of all requests."""
        self._remembered_of: SupervisedGang | None = None
        self._remembered = RememberedPrefixes()

    @property
    def takes_requests(self) -> bool:
        """Whether a request can be given to it now."""
        return self.supervisor.state is GangState.SERVING and not self.is_retiring

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
        return self.supervisor.newest_info

    def status(self) -> ReplicaStatus:
        """How it stands now."""
        supervisor = self.supervisor
        state = supervisor.state
        return ReplicaStatus(
            index=self.index,
            state=GangState.DRAINING if self.is_retiring and state is GangState.SERVING else state,
            failure=supervisor.failure,
            num_live=self.num_live,
            num_rebuilds=supervisor.num_rebuilds,
            seconds_since_heartbeat=supervisor.seconds_since_heartbeat,
            stats=supervisor.stats,
            info=self.info,
        )
