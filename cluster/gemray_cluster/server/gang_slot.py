"""A place for a gang that is still starting, so that the server can listen, and say so, from the first second."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from gemray_cluster.gang_client import GangClient, GangState, GangUnavailable
from gemray_workers.messages import EngineStats, GangInfo, SequenceDelta, Submit


class GangSlot:
    """A `GangClient` that is STARTING until `fill` is called and then stands for that gang."""

    def __init__(self) -> None:
        self._gang: GangClient | None = None

    def fill(self, gang: GangClient) -> None:
        """The gang is there."""
        self._gang = gang

    @property
    def state(self) -> GangState:
        """As in `GangClient`."""
        return self._gang.state if self._gang else GangState.STARTING

    @property
    def failure(self) -> str | None:
        """As in `GangClient`."""
        return self._gang.failure if self._gang else None

    @property
    def info(self) -> GangInfo:
        """As in `GangClient`."""
        return self._filled().info

    @property
    def stats(self) -> EngineStats | None:
        """As in `GangClient`."""
        return self._gang.stats if self._gang else None

    @property
    def seconds_since_heartbeat(self) -> float:
        """As in `GangClient`; 0 while there is no gang to be late."""
        return self._gang.seconds_since_heartbeat if self._gang else 0.0

    def generate(self, submit: Submit) -> AsyncGenerator[SequenceDelta, None]:
        """As in `GangClient`."""
        return self._filled().generate(submit)

    async def stop(self) -> None:
        """As in `GangClient`."""
        if self._gang is not None:
            await self._gang.stop()

    def _filled(self) -> GangClient:
        if self._gang is None:
            raise GangUnavailable("the gang is starting")
        return self._gang
