"""grpc.health.v1: SERVING only while requests would be taken; one more name tells whether a restart would help.

Names, as the Helm chart's probes use them: "" and each service's full name for readiness, `LIVENESS` for liveness.
"""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio  # type: ignore[attr-defined]

from gemray_cluster.gang.client import GangClient, GangState
from gemray_cluster.server.request_limiter import RequestLimiter

LIVENESS = "gemray.liveness"
"""SERVING while the gang starts, serves, drains or is rebuilt; NOT_SERVING once it has failed for good."""

POLL_S = 0.1
"""How late a change of the gang's state may show."""


class HealthReporter:
    """Keeps the health servicer true to the state of gang and server."""

    def __init__(self, gang: GangClient, limiter: RequestLimiter, service_names: tuple[str, ...]) -> None:
        """`service_names` get the same status as the server as a whole, which is the empty name."""
        self.servicer: Any = aio.HealthServicer()
        self._gang = gang
        self._limiter = limiter
        self._names = ("", *service_names)

    async def update(self) -> None:
        """Report the present state."""
        serving = self._gang.state is GangState.SERVING and not self._limiter.is_closed
        for name in self._names:
            await self.servicer.set(name, _status(serving))
        await self.servicer.set(LIVENESS, _status(self._gang.state not in (GangState.FAILED, GangState.STOPPED)))

    async def run(self) -> None:
        """Report for ever. Watchers are told of changes only."""
        while True:
            await self.update()
            await asyncio.sleep(POLL_S)


def _status(is_serving: bool) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
    return health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
