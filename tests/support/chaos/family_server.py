"""A whole server over replicas of the embedded family whose ranks are plain processes: ``python -m`` this module.

The same router, supervisors, gangs and gRPC server as `gemray serve`, without Ray. It tells on standard output, in
lines of JSON, where it listens and which processes serve: ``{"address": "127.0.0.1:50051", "replicas": {"0": [12]}}``.
SIGTERM drains it; it exits with 1 when requests were cut.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys

from gemray_cluster.gang.client import GangState
from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.gang import Gang
from gemray_cluster.gang.router import Router
from gemray_cluster.gang.scaling import ReplicaLimits
from gemray_cluster.gang.supervisor import SupervisedGang
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.server.requests import RequestReader
from gemray_cluster.server.server import GenerationServer
from gemray_workers.rank.blueprint import Blueprint
from support.chaos.family import SLOTS, served_config
from support.cluster.gang_log import GangLog
from support.cluster.process_launcher import ProcessLauncher
from support.engine.embedded_devices import TARGET

_LOOK_S = 0.05


class Account:
    """Tells of each change in which processes serve."""

    def __init__(self, server: GenerationServer, router: Router, gangs: GangLog) -> None:
        self._server, self._router, self._gangs = server, router, gangs
        self._told: dict[int, SupervisedGang] | None = None
        self._pids: dict[SupervisedGang, list[int]] = {}

    async def run(self) -> None:
        """For ever."""
        while True:
            serving = {
                replica.index: replica.supervisor.serving_gang()
                for replica in self._router._replicas
                if replica.supervisor.state is GangState.SERVING
            }
            if serving != self._told:
                await self._tell(serving)
            await asyncio.sleep(_LOOK_S)

    async def _tell(self, serving: dict[int, SupervisedGang]) -> None:
        for gang in serving.values():
            if gang not in self._pids:
                self._pids[gang] = await self._gangs.process_ids(gang)
        replicas = {index: self._pids[gang] for index, gang in serving.items()}
        print(json.dumps({"address": self._server.address, "replicas": replicas}), flush=True)
        self._told = serving


async def main(port: int, replicas: int, ranks: int, heartbeat_s: float, drain_s: float) -> int:
    """Serve until SIGTERM, then drain; the exit code."""
    engine = served_config(ranks)
    Blueprint.of(engine)  # read once, for all ranks
    cluster = ClusterConfig(start_deadline_s=600, heartbeat_deadline_s=heartbeat_s, stop_deadline_s=10)
    gangs = GangLog(lambda: Gang(ProcessLauncher(engine), cluster, engine))
    router = Router(ReplicaLimits(replicas=replicas), max_rebuilds=1000)
    reader = RequestReader.from_directory(str(TARGET))
    server = GenerationServer(ServerConfig(port=port, drain_deadline_s=drain_s), router, reader)
    told_to_end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_end.set)
    await server.start()
    await router.start(gangs, slots=SLOTS)
    await server.report_health()
    account = asyncio.create_task(Account(server, router, gangs).run())
    await told_to_end.wait()
    account.cancel()
    num_cut = await server.drain()
    await server.close()
    await router.stop()
    return 1 if num_cut else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heartbeat-s", type=float, default=30.0)
    parser.add_argument("--drain-s", type=float, default=300.0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(asyncio.run(main(options.port, options.replicas, options.ranks, options.heartbeat_s, options.drain_s)))
