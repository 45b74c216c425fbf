"""A gang that outlives its processes: one that fails is rebuilt in place."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from gemray_cluster.gang.client import GangClient, GangState, GangUnavailable, why_not_serving
from gemray_cluster.gang.diagnosis import in_words
from gemray_cluster.gang.gang import no_listener
from gemray_cluster.gang.launcher import ProgressListener
from gemray_cluster.gang.replay import Replays
from gemray_cluster.gang.together import counts_of_gone, total_stats
from gemray_workers.errors import CheckpointError, GemrayError, InvalidField
from gemray_workers.messages import EngineStats, GangInfo

logger = logging.getLogger(__name__)

PERIOD_S = 300.0
"""Failures longer ago than this do not count against a gang."""


class SupervisedGang(GangClient, Protocol):
    """A gang as the supervisor uses it: named, launched once, and waited for until it ends."""

    name: str
    """What log lines call it."""

    async def launch(self, progress: ProgressListener = no_listener) -> None:
        """Start, once; raises GemrayError."""
        ...

    async def wait_ended(self) -> GangState:
        """Return when it has ended and released what it held."""
        ...


class Supervisor:
    """A gang and those that follow it: STARTING until one serves, and again while another is built.

    The requests are the router's: it gives them to the gang of the moment, and replays those that one fails under.
    """

    def __init__(
        self,
        *,
        max_rebuilds: int,
        clock: Callable[[], float] = time.monotonic,
        changed: asyncio.Condition | None = None,
        replays: Replays | None = None,
        name: str = "the gang",
    ) -> None:
        """Start nothing yet.

        Args:
            max_rebuilds: after so many failures within `PERIOD_S` the next one is final.
            clock: seconds.
            changed: notified when a gang comes to serve and when none will follow; several supervisors may share it.
            replays: the requests that are live, where several supervisors share them.
            name: what log lines call its gang.
        """
        self._max_rebuilds = max_rebuilds
        self._clock = clock
        self._make: Callable[[], SupervisedGang] | None = None
        self._gang: SupervisedGang | None = None
        self._counted: tuple[EngineStats | None, SupervisedGang | None] = (None, None)
        """Counts of earlier gangs, and the present one; in one place, as a scrape reads them from another thread."""
        self._info: GangInfo | None = None
        self._failure: str | None = None
        self._failed_at: list[float] = []
        self._down_since: float | None = None
        """When the gang that served last had ended, until another serves."""
        self._supervising: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._changed = changed or asyncio.Condition()
        self._replays = replays or Replays()
        self._name = name
        self.num_rebuilds = 0
        """Gangs that served after another had failed."""

    @property
    def state(self) -> GangState:
        """As in `GangClient`; FAILED only once no gang will follow."""
        if self._gang is None or (self._gang.state is GangState.FAILED and not self._over.is_set()):
            return GangState.STARTING
        return self._gang.state

    @property
    def failure(self) -> str | None:
        """Why the newest gang that failed did, until another serves."""
        if self.state is GangState.SERVING:
            return None
        # A gang that has just failed knows why while its end is still being waited for.
        if self._gang is not None and self._gang.failure and not self._over.is_set():
            return self._gang.failure
        return self._failure

    @property
    def info(self) -> GangInfo | None:
        """That of the newest gang that has served; None before one has."""
        return self._info

    @property
    def stats(self) -> EngineStats | None:
        """As in `GangClient`; counts go on from one gang to the next."""
        earlier, gang = self._counted
        return total_stats([earlier, gang.stats if gang else None])

    @property
    def seconds_since_heartbeat(self) -> float:
        """As in `GangClient`; 0 while there is no gang to be late."""
        return self._gang.seconds_since_heartbeat if self._gang and self.state is not GangState.STARTING else 0.0

    async def start(self, make: Callable[[], SupervisedGang], progress: ProgressListener = no_listener) -> None:
        """Launch the first gang that `make` gives, and keep one from then on. Raises what its `launch` raises."""
        self._make = make
        try:
            await self._launch(progress)
        except Exception as error:
            self._failure = in_words(error)
            await self._be_over()
            raise
        self._supervising = asyncio.create_task(self._supervise())

    async def wait_ended(self) -> GangState:
        """Return when there is no gang and none will follow: FAILED or STOPPED."""
        await self._over.wait()
        return self.state

    async def stop(self) -> None:
        """As in `GangClient`; a rebuild is broken off."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait([self._supervising])
        if self._gang is not None:
            await self._gang.stop()

    @property
    def is_over(self) -> bool:
        """Whether there is no gang and none will follow, once started."""
        return self._over.is_set()

    def serving_gang(self) -> SupervisedGang:
        """The gang of the moment; raises `GangUnavailable` when none serves."""
        if self._gang is None or self.state is not GangState.SERVING:
            raise GangUnavailable(why_not_serving(self.state, self.failure))
        return self._gang

    async def _supervise(self) -> None:
        """Rebuild until told to stop, or until too many gangs have failed."""
        try:
            while await self._ended_as_failed():
                if not self._may_rebuild():
                    return
                await self._rebuild()
        except Exception as error:  # Ray's errors have no common base
            self._failure = f"it could not be rebuilt: {in_words(error)} (it had failed: {self._failure})"
            logger.error("%s could not be rebuilt: %s", self._name, in_words(error))
        finally:
            await self._be_over()

    async def _be_over(self) -> None:
        self._over.set()
        async with self._changed:
            self._changed.notify_all()

    async def _ended_as_failed(self) -> bool:
        assert self._gang is not None
        ended = await self._gang.wait_ended()
        self._failure = self._gang.failure
        if self._down_since is None:
            self._down_since = self._clock()
        return ended is GangState.FAILED

    def _may_rebuild(self) -> bool:
        now = self._clock()
        self._failed_at = [then for then in self._failed_at if now - then < PERIOD_S] + [now]
        return len(self._failed_at) <= self._max_rebuilds

    async def _rebuild(self) -> None:
        """Launch another gang. One that does not come to serve has failed in its turn, and counts: what keeps it may
        pass, like memory or a node that the one before has not given back. What is wrong with settings or files stays.

        Raises InvalidField and CheckpointError.
        """
        logger.warning(
            "rebuilding %s (%d of at most %d times within %g s), which failed: %s; live requests: %d",
            self._name, len(self._failed_at), self._max_rebuilds, PERIOD_S, self._failure, self._replays.num_live,
        )  # fmt: skip
        try:
            await self._launch(no_listener)
        except (InvalidField, CheckpointError):
            raise
        except GemrayError as error:
            logger.error("%s failed again: %s", self._name, in_words(error))
            return
        self.num_rebuilds += 1
        assert self._down_since is not None
        logger.warning(
            "%s serves again after %.1f s; live requests: %d",
            self._name, self._clock() - self._down_since, self._replays.num_live,
        )  # fmt: skip
        self._down_since = None

    async def _launch(self, progress: ProgressListener) -> None:
        assert self._make is not None
        self._gang = self._make()
        self._gang.name = self._name
        self._counted = counts_of_gone(self.stats), self._gang
        await self._gang.launch(progress)
        self._info = self._gang.info
        async with self._changed:
            self._changed.notify_all()
