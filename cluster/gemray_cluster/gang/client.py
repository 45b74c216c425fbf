"""What the front end needs of a gang, whoever runs it: Ray in a cluster, plain processes or a fake in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from gemray_workers.errors import GemrayError
from gemray_workers.messages import EngineStats, GangInfo, SequenceDelta, Submit


class GangState(Enum):
    """Where a gang stands in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class GangUnavailable(GemrayError):
    """The gang cannot take or finish a request now (starting, draining, failed)."""


class NoLongerFits(GemrayError):
    """A gang failed under a request, and the one that follows has too little memory for it."""


class GangClient(Protocol):
    """A running gang as the gRPC service sees it. All methods run on the event loop."""

    @property
    def state(self) -> GangState:
        """Where the gang stands."""
        ...

    @property
    def failure(self) -> str | None:
        """Why it failed, when `state` is FAILED."""
        ...

    @property
    def info(self) -> GangInfo:
        """The model and its shards; raises `GangUnavailable` before the gang is ready."""
        ...

    @property
    def stats(self) -> EngineStats | None:
        """The newest statistics of the engine, or None before the first step."""
        ...

    @property
    def seconds_since_heartbeat(self) -> float:
        """Age of the newest message from rank 0."""
        ...

    def generate(self, submit: Submit) -> AsyncGenerator[SequenceDelta, None]:
        """Run one request; yields each step's delta, the last one with `finish`. Two may have the same request id.

        Closing the generator early (or cancelling its task) cancels the request within one step.
        Raises `GangUnavailable` when the gang is not serving or dies half-way.
        """
        ...

    async def stop(self) -> None:
        """End the gang and release what it holds. Idempotent."""
        ...


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """How one of the gangs that serve a model side by side stands, for those who watch."""

    index: int
    state: GangState
    failure: str | None
    num_live: int
    """Requests that it was given and that have not ended."""
    num_rebuilds: int
    """Gangs that served after another had failed; goes on where the index is given anew, as the counts of `stats`."""
    seconds_since_heartbeat: float
    stats: EngineStats | None
    info: GangInfo | None
    """None before it has served."""


class ReplicatedGang(GangClient, Protocol):
    """Gangs that serve one model side by side, seen as one."""

    @property
    def replicas(self) -> Sequence[ReplicaStatus]:
        """How each stands, by index; none before the first is being started."""
        ...


def why_not_serving(state: GangState, failure: str | None) -> str:
    """A sentence for requests that a gang cannot take."""
    return f"the gang is {state.value}" + (f": {failure}" if failure else "")
