"""Replicas of a model are killed, stopped and hung while streams run: what came of the requests, and how long it took.

The same over workers without a model and over the embedded family, over plain processes or over Ray.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from gemray_cluster.gang.client import GangState
from gemray_cluster.gang.router import Router
from gemray_cluster.gang.supervisor import SupervisedGang
from gemray_workers.errors import GemrayError
from gemray_workers.messages import Submit
from support import waiting
from support.cluster.gang_log import GangLog


@dataclass(frozen=True)
class Fault:
    """Something that happens to the processes of one replica's gang."""

    name: str
    signal: signal.Signals
    ranks: tuple[int, ...]


def faults(num_ranks: int) -> list[Fault]:
    """Each rank alone, then all of them: killed, then stopped."""
    every = tuple(range(num_ranks))
    return [
        Fault(f"{number.name} of {what}", number, ranks)
        for number in (signal.SIGKILL, signal.SIGSTOP)
        for what, ranks in [*((f"rank {rank}", (rank,)) for rank in every), ("a whole gang", every)]
    ]


@dataclass
class Outcome:
    """What one fault did."""

    fault: str
    num_live: int
    """Requests that had begun and not ended when it happened."""
    num_hit: int
    """Those of them that the replica had."""
    seconds_to_detect: float
    """From the fault until the replica no longer served."""
    seconds_to_serve: float
    """From the fault until all replicas served."""


class Clients:
    """Streams that are asked for again and again, so that at any time as many are live."""

    def __init__(self, router: Router, submits: Sequence[Submit]) -> None:
        """Begin them all."""
        self._router = router
        self._ending = False
        self.answers: list[tuple[str, list[int]]] = []
        """(request id, ids) of each answer that ended."""
        self.lost: list[str] = []
        """What requests that ended without a whole answer met."""
        self.lengths: dict[str, int] = {}
        """Tokens of the requests that are live."""
        self._tasks = [asyncio.create_task(self._ask_again(submit)) for submit in submits]

    async def end(self, deadline_s: float) -> None:
        """Let the streams that are live end, and ask no more."""
        self._ending = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), deadline_s)

    def cancel(self) -> None:
        """Leave at once."""
        for task in self._tasks:
            task.cancel()

    async def _ask_again(self, submit: Submit) -> None:
        while not self._ending:
            await self._ask(submit)

    async def _ask(self, submit: Submit) -> None:
        ids: list[int] = []
        finish = None
        self.lengths[submit.request_id] = 0
        try:
            async with aclosing(self._router.generate(submit)) as deltas:
                async for delta in deltas:
                    ids += delta.token_ids
                    finish = delta.finish
                    self.lengths[submit.request_id] = len(ids)
        except GemrayError as error:
            self.lost.append(f"{submit.request_id}: {error}")
            await asyncio.sleep(0.1)
        else:
            if finish in ("length", "stop_token"):
                self.answers.append((submit.request_id, ids))
            else:
                self.lost.append(f"{submit.request_id}: finish {finish}")
        finally:
            del self.lengths[submit.request_id]


async def strike(router: Router, clients: Clients, gangs: GangLog, fault: Fault, *, deadline_s: float) -> Outcome:
    """Let `fault` happen to the busiest replica once streams run, and wait until all replicas serve again."""
    await waiting.eventually(lambda: all_serve(router) and sum(map(bool, clients.lengths.values())) > 1, deadline_s)
    status = max(router.replicas, key=lambda replica: replica.num_live)
    gang: SupervisedGang = next(r for r in router._replicas if r.index == status.index).supervisor.serving_gang()
    pids = await gangs.process_ids(gang)
    rebuilds = router.num_rebuilds
    began = time.monotonic()
    num_live, num_hit = len(clients.lengths), status.num_live
    for rank in fault.ranks:
        os.kill(pids[rank], fault.signal)
    await waiting.eventually(lambda: gang.state is not GangState.SERVING, deadline_s)
    detected = time.monotonic()
    await waiting.eventually(lambda: router.num_rebuilds > rebuilds and all_serve(router), deadline_s)
    return Outcome(fault.name, num_live, num_hit, detected - began, time.monotonic() - began)


def all_serve(router: Router) -> bool:
    """Whether no replica is missing."""
    return all(replica.state is GangState.SERVING for replica in router.replicas)
