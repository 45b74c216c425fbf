"""A gang on a Ray cluster: one placement group, one actor a rank. Ray is never on the per-step path."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from typing_extensions import override

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.gang import Gang
from gemray_cluster.gang.launcher import (
    ProgressListener,
    Rank,
    RankDied,
    StartProgress,
)
from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_cluster.gang.unless import unless
from gemray_cluster.ray_runtime.actor import ACTOR_OPTIONS, CONTROL, LONG_CALLS, locate_actor, node_ip
from gemray_cluster.ray_runtime.blocking import in_own_thread
from gemray_cluster.ray_runtime.forwarded import forwarded_variables
from gemray_cluster.ray_runtime.own_processes import OwnProcesses
from gemray_cluster.ray_runtime.placement import release, reserve, warn_if_apart
from gemray_cluster.ray_runtime.session import NICENESS, NOSET_DEVICES, RaySession
from gemray_cluster.ray_runtime.worker_log import last_words
from gemray_workers.config import EngineConfig
from gemray_workers.rank.waiting_threads import waiting_threads
from gemray_workers.rank.worker import RankWorker

P = ParamSpec("P")
T = TypeVar("T")


class RayGang(Gang):
    """A `GangClient` whose ranks are Ray actors."""

    def __init__(
        self,
        session: RaySession,
        config: ClusterConfig,
        engine: EngineConfig,
        *,
        served: ServedCheckpoints,
        worker_class: type[RankWorker] = RankWorker,
    ) -> None:
        """Start nothing yet.

        Args:
            session: an open one; repaired by `launch` when its Ray has died.
            config: placement and deadlines.
            engine: the engine's settings; one rank per tensor-parallel shard.
            served: one for all gangs of a server.
            worker_class: made in each rank's process; tests put another one in its place.
        """
        super().__init__(RayLauncher(session, config, engine, worker_class), config, engine, served)


class RayLauncher:
    """Reserves a placement group and starts an actor in each of its bundles."""

    def __init__(
        self, session: RaySession, config: ClusterConfig, engine: EngineConfig, worker_class: type[RankWorker]
    ) -> None:
        """Start nothing yet."""
        self._session = session
        self._config = config
        self._engine = engine
        self._worker_class = worker_class
        self._name = f"gang-{uuid.uuid4().hex[:8]}"
        self._group: PlacementGroup | None = None
        self._ray: OwnProcesses | None = None
        """Our own Ray that the ranks run on; another one may follow it while they end."""

    async def launch(self, num_ranks: int, progress: ProgressListener) -> list[Rank]:
        """Wait for room, then start the actors. Raises CapacityError, and ClusterUnreachable without a Ray."""
        await self._session.repair()
        self._ray = self._session.processes
        progress(StartProgress("placement", 0, num_ranks))
        bundle: dict[str, float] = {"CPU": self._config.cpus_per_rank}
        if self._engine.device == "cuda":
            bundle["GPU"] = 1
        self._group = await unless(
            self.lost(),
            reserve(
                num_ranks,
                bundle,
                strategy=self._config.strategy,
                deadline_s=self._config.placement_deadline_s,
                name=self._name,
                waiting=lambda shortage: progress(StartProgress("placement", 0, num_ranks, shortage)),
            ),
        )
        if self._engine.drafter_placement == "dedicated":
            await warn_if_apart(self._group, drafter_rank=num_ranks - 1)
        progress(StartProgress("placement", num_ranks, num_ranks))
        return await in_own_thread(lambda: [self._start_actor(rank, bundle) for rank in range(num_ranks)])

    async def here(self) -> tuple[str, str]:
        """The driver's node."""
        return await in_own_thread(lambda: (ray.get_runtime_context().get_node_id(), node_ip()))

    async def lost(self) -> str:
        """Return when our own Ray has died; never for a cluster's, which may come back by itself."""
        if self._ray is not None:
            return await self._ray.lost()
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def release(self) -> None:
        """Remove the placement group. Idempotent."""
        group, self._group = self._group, None
        if group is not None and await _can_be_asked(self._ray):
            await _unless_left(release(group))

    def _start_actor(self, rank: int, bundle: dict[str, float]) -> Rank:
        assert self._group is not None
        actor_class: Any = ray.remote(**ACTOR_OPTIONS)(self._worker_class)
        actor = actor_class.options(
            name=f"{self._name}-rank{rank}",
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
            runtime_env=None if self._ray is not None else _forwarded_environment(),
        ).remote(self._engine, rank, locate_actor)
        return RayRank(actor, self._ray)


def _forwarded_environment() -> dict[str, Any]:
    """The runtime environment of a rank on a cluster's Ray. Our own has inherited these variables, and without such an
    environment a rank may take a process that Ray has started ahead."""
    own = {NOSET_DEVICES: "1", NICENESS: os.environ.get(NICENESS, "0"), **waiting_threads(os.environ)}
    return {"env_vars": {**own, **forwarded_variables(os.environ)}}


class RayRank(Rank):
    """One rank's actor, awaited without blocking the event loop."""

    def __init__(self, actor: ActorHandle[Any], own_ray: OwnProcesses | None) -> None:
        """Hold the actor: it lives as long as this handle. `own_ray` is what it runs on, if we started that."""
        self.actor = actor
        self._ray = own_ray

    @override
    async def call(self, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        options = {} if method.__name__ in LONG_CALLS else {"concurrency_group": CONTROL}
        return await _result(getattr(self.actor, method.__name__).options(**options).remote(*args, **kwargs))

    @override
    async def kill(self) -> None:
        if await _can_be_asked(self._ray):
            await _unless_left(in_own_thread(ray.kill, self.actor))
        elif self._ray is not None:
            await in_own_thread(self._ray.kill)


async def _can_be_asked(own_ray: OwnProcesses | None) -> bool:
    """Whether Ray answers calls about what ran on it; a cluster's always may."""
    return own_ray is None or await own_ray.can_be_asked()


async def _unless_left(ending: Awaitable[None]) -> None:
    """End something, unless this process has left Ray meanwhile, with which all that it started there has ended."""
    try:
        await ending
    except Exception:  # Ray's errors have no common base
        if ray.is_initialized():
            raise


async def _result(ref: ray.ObjectRef[T]) -> T:
    """A call's result. Raises what the actor's method raised, or RankDied when its process is gone."""
    try:
        # Shielded: Ray sets the future's result from a thread of its own, even if nothing waits for it any more. Then
        # an error (we have killed the actor) is not reported.
        answer = asyncio.wrap_future(ref.future())
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(answer)
    except RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, Exception) else error) from error
    except RayActorError as error:
        raise RankDied(_why(error)) from error


def _why(error: RayActorError) -> str:
    """Ray's account of a dead actor in one line: its identity and the first sentences of the reason."""
    lines = [line.strip() for line in str(error).splitlines()]
    facts = dict(line.split(": ", 1) for line in lines if line.startswith(("pid: ", "ip: ")))
    reason = next((line for line in lines if "worker process has died" in line or "node" in line), lines[0])
    reason = reason.split(" Some common causes", 1)[0]
    where = f" (pid {facts['pid']} on {facts['ip']})" if {"pid", "ip"} <= facts.keys() else ""
    said = _said_last(facts.get("pid", ""), facts.get("ip", ""))
    return f"its process died{where}: {reason}" + (f" Its log ends with: {said}" if said else "")


def _said_last(pid: str, ip: str) -> str | None:
    """The cause in the worker's own log, where that lies on this machine."""
    node: Any = ray._private.worker._global_node
    if node is None or not pid.isdecimal() or ip != node.node_ip_address:
        return None
    return last_words(Path(node.get_logs_dir_path()), int(pid))
