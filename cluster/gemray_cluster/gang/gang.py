"""A gang's life, however its processes are launched: start, serve, notice a failure, end.

Nothing here blocks the event loop, and every wait has a deadline. The ranks run by themselves; this side sees
them through the message channel (tokens, heartbeats) and through their processes (`RankWorker.run` ends when one dies).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress

import msgspec

from gemray_cluster.gang.bring_up import DIAGNOSIS_S, BringUp
from gemray_cluster.gang.client import GangState, GangUnavailable
from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.diagnosis import account, errors_by_cause, in_words
from gemray_cluster.gang.found_memory import tell_memory
from gemray_cluster.gang.laps import Laps, in_parts
from gemray_cluster.gang.launcher import (
    Launcher,
    ProgressListener,
    Rank,
    RankDied,
    StartProgress,
)
from gemray_cluster.gang.lifeline import Lifeline
from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_cluster.gang.streams import StreamTable
from gemray_cluster.gang.unless import unless
from gemray_cluster.gang.whereabouts import ask, in_a_line, with_stacks
from gemray_workers.channel import GangChannel
from gemray_workers.config import EngineConfig
from gemray_workers.errors import CommunicationError
from gemray_workers.messages import (
    Cancel,
    Compiling,
    EngineStats,
    GangFailed,
    GangInfo,
    SequenceDelta,
    StepOutput,
    Stop,
    Submit,
)
from gemray_workers.rank.process import RankFacts
from gemray_workers.rank.worker import RankWorker

logger = logging.getLogger(__name__)


def no_listener(progress: StartProgress) -> None:
    """Ignore the progress of a start."""


class Gang:
    """A `GangClient` over the processes of a `Launcher`. Make it, then `launch` it, once."""

    def __init__(
        self,
        launcher: Launcher,
        config: ClusterConfig,
        engine: EngineConfig,
        served: ServedCheckpoints,
    ) -> None:
        """Start nothing yet. `served` is one for all gangs of a server."""
        self.name = "the gang"
        """What log lines call it: one of several is a replica."""
        self._launcher = launcher
        self._config = config
        self._engine = engine
        self._served = served
        self._state = GangState.STARTING
        self._failure: str | None = None
        self._stage = "not launched"
        self._lost: str | None = None
        """What died under the ranks."""
        self._ranks: list[Rank] = []
        self._facts: list[RankFacts] = []
        self._node_id: str | None = None
        self._runs: list[asyncio.Task[None]] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._launching: asyncio.Task[object] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._lifeline: Lifeline | None = None
        self._channel: GangChannel | None = None
        self._streams = StreamTable()
        self._info: GangInfo | None = None
        self._stats: EngineStats | None = None
        self._heard_at = time.monotonic()
        self._heard = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def state(self) -> GangState:
        """Where the gang stands."""
        return self._state

    @property
    def failure(self) -> str | None:
        """Why it failed, when `state` is FAILED."""
        return self._failure

    @property
    def info(self) -> GangInfo:
        """The model and its shards; raises `GangUnavailable` before the gang is ready."""
        if self._info is None:
            raise GangUnavailable(f"the gang is {self._state.value} ({self._stage})")
        return self._info

    @property
    def stats(self) -> EngineStats | None:
        """The newest statistics of the engine, or None before the first step."""
        return self._stats

    @property
    def seconds_since_heartbeat(self) -> float:
        """Age of the newest message from rank 0."""
        return time.monotonic() - self._heard_at

    async def launch(self, progress: ProgressListener = no_listener) -> None:
        """Start the processes, load the model, and return when the gang serves.

        Raises:
            CapacityError: no room in the cluster at the placement deadline.
            GemrayError: what a rank found wrong (InvalidField, CheckpointError, ...), as itself.
            GangUnavailable: a rank died, the ranks disagree, or the start deadline passed.
        """
        self._launching = asyncio.current_task()
        laps = Laps()
        try:
            self._stage = "waiting for resources"
            self._ranks = await self._launcher.launch(self._engine.gang_size, progress)
            laps.end("placement")
            try:
                async with asyncio.timeout(self._config.start_deadline_s):
                    await unless(self._launcher.lost(), self._bring_up(progress, laps))
            except TimeoutError:
                raise GangUnavailable(
                    f"the gang was not ready within start_deadline_s = {self._config.start_deadline_s:g}: "
                    f"still {self._stage}{await self._where()}"
                ) from None
        except asyncio.CancelledError:
            await asyncio.shield(self._end(GangState.STOPPED))
            raise
        except BaseException as error:
            self._failure = in_words(error)
            await asyncio.shield(self._end(GangState.FAILED))
            raise
        finally:
            self._launching = None

    async def stop(self) -> None:
        """End the gang and release what it holds. Idempotent; safe at any time of its life."""
        if self._launching is not None:
            self._launching.cancel()
        elif self._ending is None and not self._ended.is_set():
            self._ending = asyncio.create_task(self._stop_in_order())
        await self._ended.wait()

    async def wait_ended(self) -> GangState:
        """Return when the gang has ended and released what it held: FAILED or STOPPED."""
        await self._ended.wait()
        return self._state

    # --- start -------------------------------------------------------------------------------------------------

    async def _bring_up(self, progress: ProgressListener, laps: Laps) -> None:
        ranks = BringUp(self._ranks, self._config, self._engine, progress, laps)
        self._stage = "starting processes"
        await ranks.meet()
        self._facts = ranks.facts
        await ranks.agree(self._served)
        here = await self._launcher.here()
        self._node_id = here[0]
        self._lifeline = await ranks.tie(here)
        self._channel = ranks.open_channel(here)
        self._stage = "loading weights"
        self._info = await ranks.load()
        self._stage = "waiting for the first step"
        self._runs = [
            asyncio.create_task(rank.call(RankWorker.run, self._channel.address if index == 0 else None))
            for index, rank in enumerate(self._ranks)
        ]
        self._watchers = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch_runs())]
        await self._heard.wait()
        if self._state is not GangState.STARTING:
            await self._diagnose()
            raise GangUnavailable(self._failure or "the gang ended while it started")
        self._watchers.append(asyncio.create_task(self._watch_heartbeat()))
        self._watchers.append(asyncio.create_task(self._watch_launcher()))
        self._state = GangState.SERVING
        laps.end("first step")
        logger.info("%s started in %s", self.name, laps)
        if parts := self._info.ranks[0].load_seconds:
            logger.info("%s: rank 0 loaded in %.1f s: %s", self.name, sum(parts.values()), in_parts(parts))
        tell_memory(self._info, self.name)
        progress(StartProgress("ready", len(self._ranks), len(self._ranks)))

    # --- serve -------------------------------------------------------------------------------------------------

    async def generate(self, submit: Submit) -> AsyncGenerator[SequenceDelta, None]:
        """Run one request, as `GangClient.generate` says."""
        if self._state is not GangState.SERVING or self._channel is None:
            raise GangUnavailable(f"the gang is {self._state.value}: {self._failure or self._stage}")
        stream = self._streams.open(submit.request_id)
        finished = False
        try:
            self._post(msgspec.structs.replace(submit, request_id=stream.wire_id))
            while not finished:
                delta = await stream.next()
                finished = delta.finish is not None
                yield delta
        finally:
            self._streams.close(stream)
            if not finished and self._state is GangState.SERVING:
                with suppress(GangUnavailable):
                    self._post(Cancel(stream.wire_id))

    def _post(self, message: Submit | Cancel | Stop) -> None:
        assert self._channel is not None
        try:
            self._channel.post(message)
        except CommunicationError as error:
            self._fail(str(error))
            raise GangUnavailable(str(error)) from error

    async def _receive(self) -> None:
        assert self._channel is not None
        try:
            while True:
                message = await self._channel.receive()
                self._heard_at = time.monotonic()
                match message:
                    case StepOutput(deltas, stats):
                        self._stats = stats
                        self._streams.deliver(deltas)
                        self._heard.set()
                    case Compiling():
                        logger.info("rank 0 compiles a program; requests wait for it")
                    case GangFailed(reason):
                        self._fail(reason)
        except CommunicationError as error:
            self._fail(str(error))

    # --- notice a failure --------------------------------------------------------------------------------------

    async def _watch_runs(self) -> None:
        """A rank's loop ends only when told to."""
        await asyncio.wait(self._runs, return_when=asyncio.FIRST_COMPLETED)
        errors = errors_by_cause(self._runs)
        self._fail(account(errors) if errors else "a rank left its loop without being told to stop")

    async def _watch_launcher(self) -> None:
        """What the ranks run on has died: they will follow, but need not be waited for."""
        self._lost = await self._launcher.lost()
        self._fail(self._lost)

    async def _watch_heartbeat(self) -> None:
        deadline = self._config.heartbeat_deadline_s
        while True:
            await asyncio.sleep(min(1.0, deadline / 4))
            if self.seconds_since_heartbeat <= deadline:
                continue
            await asyncio.sleep(0.1)  # was it this loop that slept? Then messages are waiting: take them first
            if (silence := self.seconds_since_heartbeat) > deadline:
                self._fail(f"rank 0 was silent for {silence:.1f} s (heartbeat_deadline_s = {deadline:g})")
                return

    def _fail(self, symptom: str) -> None:
        """Take no more requests and start the end. What comes later tells why, and changes nothing else."""
        if self._state not in (GangState.STARTING, GangState.SERVING):
            return
        started = self._state is GangState.SERVING
        self._state, self._failure = GangState.FAILED, symptom
        self._heard.set()
        if started:  # else `launch` is still there to end it
            self._ending = asyncio.create_task(self._end_as_failed())

    async def _end_as_failed(self) -> None:
        """End the requests in flight once it is known why, then everything else."""
        await self._diagnose()
        if self._lost is None and not any(isinstance(error, RankDied) for _, error in errors_by_cause(self._runs)):
            self._failure = f"{self._failure}{await self._where()}"
        logger.error("the gang failed: %s", self._failure)
        self._streams.fail_all(f"the gang failed: {self._failure}")
        await self._end(GangState.FAILED)

    async def _diagnose(self) -> None:
        """Put the ranks' own errors in the place of the first symptom, which often is what one saw of another's end.

        Waits until a rank is known to have died or all have said why they ended, at most `DIAGNOSIS_S`.
        """
        running = set(self._runs)
        until = time.monotonic() + DIAGNOSIS_S
        while self._lost is None and running and time.monotonic() < until:
            left = max(0.0, until - time.monotonic())
            _, running = await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if any(isinstance(error, RankDied) for _, error in errors_by_cause(self._runs)):
                break
        if self._lost is None and (errors := errors_by_cause(self._runs)):
            self._failure = account(errors)

    async def _where(self) -> str:
        """What those ranks do that have not ended, in words that follow others; their stacks go to the log."""
        busy = {i: rank for i, rank in enumerate(self._ranks) if i >= len(self._runs) or not self._runs[i].done()}
        found = await ask(busy, self._facts, self._node_id)
        if stacks := with_stacks(found):
            logger.error("%s: what its ranks do before they are ended:\n%s", self.name, stacks)
        return f"; {in_a_line(found)}" if found else ""

    # --- end ---------------------------------------------------------------------------------------------------

    async def _stop_in_order(self) -> None:
        """Ask the engine to end, wait for the ranks, then end what is left by force."""
        try:
            if self._state is GangState.SERVING:
                await self._drain()
        except CommunicationError as error:
            logger.warning("the gang could not be asked to stop: %s", error)
        finally:
            await self._end(GangState.STOPPED)

    async def _drain(self) -> None:
        """Let the engine cancel what runs and the ranks leave, within the stop deadline."""
        assert self._channel is not None
        self._state, self._stage = GangState.DRAINING, "stopping"
        deadline = time.monotonic() + self._config.stop_deadline_s
        self._channel.post(Stop())
        _, running = await asyncio.wait(self._runs, timeout=self._config.stop_deadline_s)
        if running:
            logger.warning("%d ranks did not stop within %g s", len(running), self._config.stop_deadline_s)
            return
        await self._last_deltas()
        closing = [asyncio.create_task(rank.call(RankWorker.close)) for rank in self._ranks]
        await asyncio.wait(closing, timeout=max(0.1, deadline - time.monotonic()))
        for task in closing:
            task.cancel()

    async def _last_deltas(self) -> None:
        """The ranks have ended; what rank 0 sent last may still be on its way to the open streams."""
        until = time.monotonic() + 0.5
        while len(self._streams) and time.monotonic() < until:
            await asyncio.sleep(0.01)

    async def _end(self, state: GangState) -> None:
        """Kill the processes and give back everything. Nothing in here may raise: it is the last resort."""
        try:
            self._state = state
            self._streams.fail_all(f"the gang is {state.value}")
            await self._despite_everything(*(rank.kill() for rank in self._ranks))
            for task in (*self._watchers, *self._runs):
                task.cancel()
            if self._lifeline is not None:
                self._lifeline.close()
            if self._channel is not None:
                self._channel.close()
            await self._despite_everything(self._launcher.release())
        finally:
            self._ended.set()

    async def _despite_everything(self, *calls: Awaitable[None]) -> None:
        """Do what can be done within the stop deadline; log the rest."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=self._config.stop_deadline_s)
        for rank, error in errors_by_cause(tasks):
            logger.error("while ending the gang (%d): %s", rank, in_words(error))
        for task in late:
            logger.error("while ending the gang: the cluster gave no answer within %g s", self._config.stop_deadline_s)
            task.cancel()
