"""All checks of a planned `gemray serve`, without serving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gemray_cluster.check.cluster import check_cluster
from gemray_cluster.check.fit import check_fit, check_fit_before_ray, check_front_end
from gemray_cluster.check.model_directory import Checkpoints, check_model_directory
from gemray_cluster.check.open_files import check_open_files, hard_limit
from gemray_cluster.check.port import check_port
from gemray_cluster.check.resources import rank_bundle
from gemray_cluster.check.result import CheckResult, Status, fail
from gemray_cluster.check.server_files import check_server_files
from gemray_cluster.ray_runtime.blocking import in_own_thread
from gemray_cluster.ray_runtime.device import asked_device, choose_device
from gemray_cluster.ray_runtime.session import RaySession
from gemray_cluster.settings.settings import ServeSettings
from gemray_workers.errors import GemrayError

Listener = Callable[[CheckResult], None]


async def check_all(settings: ServeSettings, listener: Listener) -> list[CheckResult]:
    """Check ports, model and settings here, then join (or start) Ray as the server would and check the cluster.

    `listener` hears each result as soon as it is there. Raises InvalidField for settings that contradict each other.
    """
    server = settings.server_config()
    cluster = settings.cluster_config()
    limits = settings.replica_limits()
    num_ranks = settings.num_ranks
    results: list[CheckResult] = []

    def note(*found: CheckResult) -> None:
        results.extend(found)
        for result in found:
            listener(result)

    files = check_open_files(hard_limit(), max_live_requests=server.max_live_requests)
    note(files)
    if files.status is Status.FAIL:
        return results  # Ray would end in something that does not say so
    note(check_port("grpc port", server.host, server.port))
    if settings.metrics_port is not None:
        note(check_port("metrics port", server.host, settings.metrics_port))
    note(*await asyncio.to_thread(check_server_files, server))
    # The front end reads the tokenizer; the ranks' nodes are asked for the weights below.
    here = check_model_directory(settings.model, node=None, weights=False)
    note(here)
    if here.status is not Status.FAIL:
        here = await asyncio.to_thread(check_front_end, settings.model)
        note(here)
    asked = asked_device(settings.device)
    fit: list[CheckResult] = []
    if here.status is not Status.FAIL:
        fit = await asyncio.to_thread(check_fit_before_ray, settings, asked)
        note(*fit)
    try:
        session = await RaySession.open(cluster, num_ranks=limits.most * num_ranks)
    except GemrayError as error:
        note(fail("ray", f"{error}."))
        return results
    try:
        device = choose_device(settings.device)
        if here.status is not Status.FAIL and not fit:
            note(*await asyncio.to_thread(check_fit, settings, device))
        bundle = rank_bundle(cluster, device)
        checkpoints = Checkpoints(settings.model, settings.drafter, weights=not settings.random_weights)
        found = await in_own_thread(
            check_cluster,
            num_ranks=num_ranks,
            bundle=bundle,
            checkpoints=checkpoints,
            num_gangs=limits.at_start,
            may_grow=session.processes is None,
        )
        note(*found)
    finally:
        await session.close()
    return results
