"""The embedded model behind a gRPC server, on one rank in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.gang import Gang
from gemray_cluster.gang.router import Router
from gemray_cluster.gang.scaling import ReplicaLimits
from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.server.requests import RequestReader
from gemray_cluster.server.server import GenerationServer
from gemray_workers.embedded import embedded_path
from support.cluster.process_launcher import ProcessLauncher
from support.engine.engine_runner import engine_config

CLUSTER = ClusterConfig(placement_deadline_s=120, start_deadline_s=300, heartbeat_deadline_s=120, stop_deadline_s=10)


@asynccontextmanager
async def embedded_server(**changes: Any) -> AsyncIterator[GenerationServer]:
    """gemray-tiny with its MTP assistant in float64, on a free port; `changes` are the engine's."""
    model = str(embedded_path("gemray-tiny"))
    settings = {
        "drafter_path": str(embedded_path("gemray-tiny-assistant")),
        "num_draft_tokens": 3,
        "max_model_len": 1024,
        "page_size": 16,
        "poison_freed_pages": False,
        **changes,
    }
    engine = engine_config(model, **settings)
    gang = Router(ReplicaLimits(), max_rebuilds=0)
    served = ServedCheckpoints()
    await gang.start(lambda: Gang(ProcessLauncher(engine), CLUSTER, engine, served), slots=engine.max_num_seqs)
    try:
        server = GenerationServer(ServerConfig(port=0), gang, RequestReader.from_directory(model))
        await server.start()
        try:
            yield server
        finally:
            await server.close()
    finally:
        await gang.stop()
