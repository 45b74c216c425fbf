"""A whole server over replicas whose ranks are plain processes: the same router, supervisors, gangs and gRPC server as
`gemray serve`, without Ray.

It tells on standard output, in lines of JSON, where it listens and which processes serve:
``{"address": "127.0.0.1:50051", "replicas": {"0": [12]}}``. SIGTERM drains it.
"""

from __future__ import annotations

import asyncio
import json
import signal

from gemray_cluster.gang.client import GangState
from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.gang import Gang
from gemray_cluster.gang.router import Router
from gemray_cluster.gang.scaling import ReplicaLimits
from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_cluster.gang.supervisor import SupervisedGang
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.server.requests import RequestReader
from gemray_cluster.server.server import GenerationServer
from gemray_workers.config import EngineConfig
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.worker import RankWorker
from support.cluster.gang_log import GangLog
from support.cluster.process_launcher import ProcessLauncher

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


async def serve(
    engine: EngineConfig,
    *,
    port: int = 0,
    replicas: int = 1,
    heartbeat_s: float = 30.0,
    drain_s: float = 300.0,
    max_rebuilds: int = 1000,
    worker_class: type[RankWorker] = RankWorker,
) -> int:
    """Serve until SIGTERM, then drain; the exit code, 1 when requests were cut."""
    Blueprint.of(engine)  # read once, for all ranks
    cluster = ClusterConfig(start_deadline_s=600, heartbeat_deadline_s=heartbeat_s, stop_deadline_s=10)
    served = ServedCheckpoints()
    gangs = GangLog(lambda: Gang(ProcessLauncher(engine, worker_class), cluster, engine, served))
    router = Router(ReplicaLimits(replicas=replicas), max_rebuilds=max_rebuilds)
    reader = RequestReader.from_directory(engine.model_path)
    server = GenerationServer(ServerConfig(port=port, drain_deadline_s=drain_s), router, reader)
    told_to_end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_end.set)
    await server.start()
    await router.start(gangs, slots=engine.max_num_seqs)
    await server.report_health()
    account = asyncio.create_task(Account(server, router, gangs).run())
    await told_to_end.wait()
    account.cancel()
    num_cut = await server.drain()
    await server.close()
    await router.stop()
    return 1 if num_cut else 0
