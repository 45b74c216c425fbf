"""grpc.health.v1: SERVING only while requests would be taken."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio  # type: ignore[attr-defined]

from gemray_cluster.gang_client import GangClient, GangState
from gemray_cluster.server.admission import Admission

POLL_S = 0.1
"""How late a change of the gang's state may show."""


class HealthReporter:
    """Keeps the health servicer true to the state of gang and server."""

    def __init__(self, gang: GangClient, admission: Admission, service_names: tuple[str, ...]) -> None:
        """`service_names` get the same status as the server as a whole, which is the empty name."""
        self.servicer: Any = aio.HealthServicer()
        self._gang = gang
        self._admission = admission
        self._names = ("", *service_names)

    async def update(self) -> None:
        """Report the present state."""
        serving = self._gang.state is GangState.SERVING and not self._admission.is_closed
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self.servicer.set(name, status)

    async def run(self) -> None:
        """Report for ever. Watchers are told of changes only."""
        while True:
            await self.update()
            await asyncio.sleep(POLL_S)
