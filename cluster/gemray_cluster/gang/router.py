"""Several gangs that serve one model as one: requests go to the least loaded, and away from one that fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from gemray_cluster.gang.balance import Routed, moves
from gemray_cluster.gang.client import GangState, GangUnavailable, ReplicaStatus, why_not_serving
from gemray_cluster.gang.diagnosis import in_words
from gemray_cluster.gang.gang import no_listener
from gemray_cluster.gang.launcher import ProgressListener
from gemray_cluster.gang.prefix_affinity import block_keys
from gemray_cluster.gang.replay import LiveRequest, Replays
from gemray_cluster.gang.replica import Past, Replica
from gemray_cluster.gang.scaling import ReplicaLimits, Scaling
from gemray_cluster.gang.start_of_all import StartOfAll
from gemray_cluster.gang.supervisor import SupervisedGang, Supervisor
from gemray_cluster.gang.together import total_stats
from gemray_workers.messages import EngineStats, GangInfo, SequenceDelta, Submit

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""How often the number of replicas and the requests that wait are looked at."""
RETRY_S = 30.0
"""After a replica could not be started or has failed for good: how long until another one is tried."""
AFFINITY_SHARE = 8
"""A replica that knows a prompt's beginning is preferred while it has at most 1/8 of its slots more requests than the
least loaded: a prefix saves part of a prefill, a queue costs whole ones."""


class Router:
    """A `GangClient` over replicas, each a supervised gang. One of them serving makes it serve.

    A request that is live when its gang fails goes on at once in another one, by replay; it waits only when none
    serves. A replica that has failed for good is left out, and replaced after a while.
    """

    def __init__(
        self,
        limits: ReplicaLimits,
        *,
        max_rebuilds: int,
        clock: Callable[[], float] = time.monotonic,
        tick_s: float = TICK_S,
        retry_s: float = RETRY_S,
    ) -> None:
        """Start nothing yet.

        Args:
            limits: how many replicas.
            max_rebuilds: of each replica, as `Supervisor` counts them.
            clock: seconds.
            tick_s: seconds between looks at the load.
            retry_s: seconds until a replica that is missing is tried again.
        """
        self._limits = limits
        self._slots = 1
        self._max_rebuilds = max_rebuilds
        self._clock = clock
        self._tick_s = tick_s
        self._retry_s = retry_s
        self._scaling = Scaling(limits)
        self._changed = asyncio.Condition()
        self._replays = Replays()
        self._replicas: list[Replica] = []
        self._make: Callable[[], SupervisedGang] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._changing: set[asyncio.Task[None]] = set()
        """Replicas that are being started or ended."""
        self._stopped = False
        self._num_given = 0
        self._routed: set[Routed] = set()
        """Requests that have not ended."""
        self._retry_at = 0.0
        self._past: dict[int, Past] = {}
        """By index, of replicas that are gone and have no successor yet."""

    # --- as one gang -------------------------------------------------------------------------------------------

    @property
    def state(self) -> GangState:
        """SERVING while any replica does; FAILED or STOPPED once none will again."""
        states = [replica.supervisor.state for replica in self._replicas]
        if GangState.SERVING in states and not self._stopped:
            return GangState.SERVING
        if self._stopped:
            return GangState.FAILED if states and set(states) == {GangState.FAILED} else GangState.STOPPED
        return GangState.FAILED if self._is_over else GangState.STARTING

    @property
    def failure(self) -> str | None:
        """Why the newest gangs that failed did, until one serves."""
        if self.state is GangState.SERVING:
            return None
        failures = {r.index: r.supervisor.failure for r in self._replicas if r.supervisor.failure is not None}
        if len(self._replicas) == 1:
            return next(iter(failures.values()), None)
        return "; ".join(f"replica {index}: {failure}" for index, failure in sorted(failures.items())) or None

    @property
    def info(self) -> GangInfo:
        """The model and one replica's shards: of the replica whose requests may be the shortest, so that each fits all.

        Raises GangUnavailable before any has served.
        """
        known = [replica.info for replica in self._replicas]
        infos = [info for info in known if info is not None]
        if not infos:
            raise GangUnavailable("the gang is starting")
        return min(infos, key=lambda info: info.model.max_model_len)

    @property
    def stats(self) -> EngineStats | None:
        """Those of all replicas together, counts of those that are gone included; None before the first step of any."""
        return total_stats([part.stats for part in self._of_all_times])

    @property
    def seconds_since_heartbeat(self) -> float:
        """Age of the newest message of the replica that has been silent the longest."""
        return max((replica.supervisor.seconds_since_heartbeat for replica in self._replicas), default=0.0)

    @property
    def num_rebuilds(self) -> int:
        """Gangs that served after another had failed, of all replicas."""
        return sum(part.num_rebuilds for part in self._of_all_times)

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """How each stands, by index."""
        return [replica.status() for replica in sorted(self._replicas, key=lambda replica: replica.index)]

    async def start(
        self, make: Callable[[], SupervisedGang], *, slots: int, progress: ProgressListener = no_listener
    ) -> None:
        """Launch the first replicas and keep them. Raises what a launch raises.

        Args:
            make: a gang, for each replica and each that follows a failed one.
            slots: requests that a gang runs at a time.
            progress: of the slowest.
        """
        self._make, self._slots = make, slots
        listeners = StartOfAll(self._limits.at_start, progress).listeners
        starts = [asyncio.create_task(self._start_one(self._add(), listener)) for listener in listeners]
        try:
            await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
            for start in starts:
                if start.done():
                    start.result()
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.shield(self._end_all(starts))
            raise
        self._keeping = asyncio.create_task(self._keep())

    async def generate(self, submit: Submit) -> AsyncGenerator[SequenceDelta, None]:
        """As in `GangClient`; raises GangUnavailable when no gang serves or follows, or none for this request."""
        keys = block_keys(submit.prompt_ids)
        if self.state is not GangState.SERVING:
            raise GangUnavailable(why_not_serving(self.state, self.failure))
        routed = Routed(keys, self._choose(keys), self._num_given)

        is_on_trial = False

        def end_trial() -> None:
            nonlocal is_on_trial
            if is_on_trial:
                is_on_trial = routed.replica.has_suspect = False

        async def gang_after(_failed: SupervisedGang, request: LiveRequest) -> SupervisedGang:
            nonlocal is_on_trial
            end_trial()
            routed.replica.num_live -= 1
            try:
                may_join = self._may_try_a_suspect if request.is_suspect else self._takers
                async with self._changed:
                    await self._changed.wait_for(lambda: self._is_over or bool(may_join()))
                if self._is_over:
                    raise GangUnavailable(f"the gang failed: {self.failure}")
                if request.is_suspect:
                    routed.replica = self._choose_for_suspect()
                    is_on_trial = routed.replica.has_suspect = True
                else:
                    routed.replica = self._choose(keys)
                    routed.given = self._num_given
            finally:
                routed.replica.num_live += 1  # in any case: the request's end takes it back
            return routed.replica.supervisor.serving_gang()

        routed.replica.num_live += 1
        self._routed.add(routed)
        gang = routed.replica.supervisor.serving_gang()
        try:
            async with aclosing(self._replays.run(submit, gang, gang_after, routed.move)) as deltas:
                async for delta in deltas:
                    if delta.token_ids:
                        end_trial()
                    yield delta
        finally:
            end_trial()
            self._routed.discard(routed)
            routed.replica.num_live -= 1

    async def wait_ended(self) -> GangState:
        """Return when no replica serves and none will: FAILED or STOPPED."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_over)
        return self.state

    async def stop(self) -> None:
        """As in `GangClient`: all replicas, at the same time."""
        self._stopped = True
        tasks = [task for task in (self._keeping, *self._changing) if task is not None]
        for task in tasks:
            task.cancel()
        await self._end_all(tasks)
        async with self._changed:
            self._changed.notify_all()

    # --- which replica -----------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._stopped or (bool(self._replicas) and all(r.supervisor.is_over for r in self._replicas))

    @property
    def _of_all_times(self) -> list[Replica | Past]:
        return [*self._replicas, *self._past.values()]

    def _takers(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.takes_requests]

    def _choose(self, keys: Sequence[bytes]) -> Replica:
        """The replica for a request whose prompt has `keys`. Raises GangUnavailable when none takes one."""
        takers = self._takers()
        if not takers:
            raise GangUnavailable(why_not_serving(self.state, self.failure))
        takers = [replica for replica in takers if not replica.has_suspect] or takers
        bound = min(r.num_live for r in takers) + max(1, self._slots // AFFINITY_SHARE)
        near = [r for r in takers if r.num_live <= bound]
        # Of equals, the one whose newest request is oldest: they take turns.
        chosen = max(near, key=lambda r: (r.prefixes.num_known(keys), -r.num_live, -r.given_at))
        self._give(chosen, keys)
        return chosen

    def _give(self, replica: Replica, keys: Sequence[bytes]) -> None:
        """Note that `replica` is given a request whose prompt has `keys`."""
        replica.prefixes.note(keys)
        self._num_given += 1
        replica.given_at = self._num_given

    def _balance(self) -> None:
        """Let requests that wait for a slot go to replicas that have one: those that joined or have become idle."""
        for request, target in moves(self._routed, self._takers(), self._slots):
            logger.info("a request that waited in replica %d goes to replica %d", request.replica.index, target.index)
            request.replica.num_live -= 1
            target.num_live += 1
            self._give(target, request.keys)
            request.replica, request.given = target, self._num_given
            request.move.go_to(target.supervisor.serving_gang())

    def _may_try_a_suspect(self) -> bool:
        """Whether a request that may kill its gang can join one: not the only one that others have while more come."""
        takers = self._takers()
        is_building = any(r.supervisor.state is GangState.STARTING and not r.is_retiring for r in self._replicas)
        return bool(takers) and (not is_building or (len(takers) > 1 and min(r.num_live for r in takers) == 0))

    def _choose_for_suspect(self) -> Replica:
        """The replica where the fewest other requests suffer if it fails."""
        return min(self._takers(), key=lambda replica: replica.num_live)

    # --- how many replicas -------------------------------------------------------------------------------------

    def _add(self) -> Replica:
        taken = {replica.index for replica in self._replicas}
        index = next(i for i in range(len(taken) + 1) if i not in taken)
        replica = Replica(
            index,
            Supervisor(
                max_rebuilds=self._max_rebuilds,
                clock=self._clock,
                changed=self._changed,
                replays=self._replays,
                name=f"replica {index}" if self._limits.most > 1 else "the gang",
            ),
            self._past.pop(index, Past()),
        )
        self._replicas.append(replica)
        return replica

    async def _start_one(self, replica: Replica, progress: ProgressListener = no_listener) -> None:
        assert self._make is not None
        await replica.supervisor.start(self._make, progress)

    async def _keep(self) -> None:
        """Replace what has failed for good, follow the load and spread it, for ever."""
        while True:
            await asyncio.sleep(self._tick_s)
            for replica in [r for r in self._replicas if r.supervisor.is_over and not r.is_retiring]:
                logger.error("replica %d is left out: %s", replica.index, replica.supervisor.failure)
                self._leave_out(replica)
            self._follow_load()
            self._balance()

    def _follow_load(self) -> None:
        now = self._clock()
        if self._changing or self._is_over:
            return
        if len(self._replicas) < self._limits.least:
            change = 1
        else:
            change = self._scaling.change(
                now=now,
                replicas=len(self._takers()),
                num_live=sum(replica.num_live for replica in self._replicas),
                slots=self._slots,
            )
        if change > 0 and now >= self._retry_at and len(self._replicas) < self._limits.most:
            self._change(self._grow(self._add()))
        if change < 0:
            takers = self._takers()
            self._change(self._shrink(min(takers, key=lambda r: (r.num_live, -r.index))))

    def _change(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(change)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)

    async def _grow(self, replica: Replica) -> None:
        logger.info("starting replica %d beside %d", replica.index, len(self._replicas) - 1)
        try:
            await self._start_one(replica)
        except Exception as error:  # Ray's errors have no common base
            logger.error("replica %d did not start: %s", replica.index, in_words(error))
            self._leave_out(replica)
        else:
            logger.info("replica %d serves", replica.index)

    async def _shrink(self, replica: Replica) -> None:
        """Give it no more requests, and its room back once the last one has ended."""
        logger.info("ending replica %d, which has %d requests", replica.index, replica.num_live)
        replica.is_retiring = True
        while replica.num_live and not replica.supervisor.is_over:
            await asyncio.sleep(self._tick_s)
        await replica.supervisor.stop()
        self._remove(replica)

    def _leave_out(self, replica: Replica) -> None:
        """It has failed for good, or has not come to serve; its gang holds nothing any more.

        Unless all have: the last ones stay, and say why.
        """
        if self._is_over:
            return
        self._retry_at = self._clock() + self._retry_s
        self._remove(replica)

    def _remove(self, replica: Replica) -> None:
        self._replicas.remove(replica)
        self._past[replica.index] = replica.past()

    async def _end_all(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(replica.supervisor.stop() for replica in self._replicas))
