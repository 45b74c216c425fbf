"""Supervised gangs behind a gRPC server, from nothing to ready and back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from gemray.channel_options import is_every_interface, is_this_machine
from gemray_cluster.check.at_start import look_before_start
from gemray_cluster.check.fit import require_memory, require_weights
from gemray_cluster.check.model_directory import Checkpoints
from gemray_cluster.check.open_files import raise_open_files
from gemray_cluster.check.resources import rank_bundle
from gemray_cluster.gang.found_memory import FoundMemory
from gemray_cluster.gang.gang import no_listener
from gemray_cluster.gang.launcher import ProgressListener, StartProgress
from gemray_cluster.gang.router import Router
from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_cluster.observability.common_labels import with_model
from gemray_cluster.observability.metrics import EngineCollector, MetricsServer, RequestMetrics
from gemray_cluster.observability.request_spans import spans_to
from gemray_cluster.observability.request_trace import TraceInterceptor
from gemray_cluster.ray_runtime.device import asked_device, choose_device
from gemray_cluster.ray_runtime.launcher import RayGang
from gemray_cluster.ray_runtime.session import RaySession
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.server.errors import RequestsCut
from gemray_cluster.server.requests import RequestReader
from gemray_cluster.server.server import GenerationServer
from gemray_cluster.serving.standstill import tell_standstills
from gemray_cluster.settings.settings import ServeSettings
from gemray_workers.checkpoint.identity import checkpoint_name

if TYPE_CHECKING:
    from gemray_workers.config import DeviceName, EngineConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Serving:
    """A server whose gangs are ready, and are rebuilt when they fail."""

    server: GenerationServer
    gang: Router


@asynccontextmanager
async def serving(
    settings: ServeSettings,
    *,
    listening: Callable[[GenerationServer], None] = lambda server: None,
    progress: ProgressListener = no_listener,
) -> AsyncIterator[Serving]:
    """Listen first, so that a taken port or a wrong directory shows at once; then start the gangs; drain on leaving.

    `listening` is told when the port is open, where health says NOT_SERVING until the gang is ready.
    Raises GemrayError: InvalidField, CheckpointError, CapacityError, AddressUnavailable, ClusterUnreachable, and
    GangUnavailable; at the end RequestsCut when requests have not finished within the drain's deadline.
    """
    server_config, cluster_config = settings.server_config(), settings.cluster_config()
    limits = settings.replica_limits()
    raise_open_files(server_config.max_live_requests)
    reader = await asyncio.to_thread(RequestReader.from_directory, settings.model)
    await asyncio.to_thread(reader.prepare_grammars)
    asked = asked_device(settings.device)
    await asyncio.to_thread(_refuse_unfit, settings, asked)
    router = Router(limits, max_rebuilds=cluster_config.max_rebuilds)
    registry = CollectorRegistry()
    endpoint = server_config.otlp_traces_endpoint
    model_name = server_config.served_model_name or checkpoint_name(settings.model)
    spans = None if endpoint is None else spans_to(endpoint, model_name)
    interceptor = TraceInterceptor(RequestMetrics(registry), spans)
    registry.register(EngineCollector(router, server_config.served_model_name))
    server = GenerationServer(server_config, router, reader, interceptors=[interceptor])
    async with AsyncExitStack() as stack:
        if spans is not None:  # first, so that it is closed after the last call
            stack.push_async_callback(asyncio.to_thread, spans.close)
        stack.callback(asyncio.create_task(tell_standstills()).cancel)
        await server.start()
        stack.push_async_callback(server.close)
        if settings.metrics_port is not None:
            series = with_model(registry, model_name)
            metrics = MetricsServer(series, host=server_config.host, port=settings.metrics_port)
            stack.callback(metrics.close)
        listening(server)
        warn_if_open(server_config)
        session = await RaySession.open(cluster_config, num_ranks=limits.most * settings.num_ranks)
        stack.push_async_callback(session.close)
        progress(StartProgress("ray", 1, 1))
        device = choose_device(settings.device)
        if asked is None:
            await asyncio.to_thread(_refuse_unfit, settings, device)
        engine_config = settings.engine_config(device)
        await asyncio.to_thread(_read_configs, settings, engine_config)
        await look_before_start(
            num_ranks=settings.num_ranks,
            num_gangs=limits.at_start,
            bundle=rank_bundle(cluster_config, engine_config.device),
            checkpoints=Checkpoints(settings.model, settings.drafter, weights=not settings.random_weights),
            may_grow=session.processes is None,
        )
        found, served = FoundMemory(engine_config), ServedCheckpoints()

        def make_gang() -> RayGang:
            infos = (replica.info for replica in router.replicas)
            engine = found.next_engine([info for info in infos if info is not None])
            return RayGang(session, cluster_config, engine, served=served)

        await router.start(
            make_gang,
            slots=engine_config.max_num_seqs,
            progress=progress,
        )
        stack.push_async_callback(router.stop)
        await server.report_health()
        stack.push_async_callback(server.close)  # before the gang goes: its streams end first
        yield Serving(server, router)
        if num_cut := await server.drain():
            raise RequestsCut(
                f"{num_cut} requests were cut: they had not finished within drain_deadline_s = "
                f"{server_config.drain_deadline_s:g}"
            )


def warn_if_open(config: ServerConfig) -> None:
    """Warn when anyone who can reach the port may use the model."""
    if is_this_machine(config.host) and not is_every_interface(config.host):
        return
    if config.auth_token_file is None and config.tls_client_ca_file is None:
        logger.warning(
            "anyone who can reach %s:%d may use this server: see --auth-token-file and --tls-client-ca-file",
            config.host, config.port,
        )  # fmt: skip


def _refuse_unfit(settings: ServeSettings, device: DeviceName | None) -> None:
    """What the ranks would refuse is refused here, in the settings' names, if the drafters can be read from here."""
    if not settings.has_drafters_here:
        return
    if device is None:
        settings.refuse_unfit()
        return
    blueprint = settings.blueprint(device)
    if settings.address is not None:
        return
    require_weights(settings, blueprint, scale_bytes=0)  # all ranks will be here, and read the scales
    if device == "cpu":
        from gemray_workers.rank.memory import PATIENCE_S

        require_memory(blueprint, num_gangs=settings.replica_limits().at_start, patience_s=PATIENCE_S)


def _read_configs(settings: ServeSettings, config: EngineConfig) -> None:
    """Read config.json files, once for all ranks, if the drafters can be read from here."""
    from gemray_workers.rank.blueprint import Blueprint

    if settings.has_drafters_here:
        Blueprint.of(config)
