"""A rank of a real model that does not come to a collective: the gang fails of it, and its account says who waits where
and for whom, over plain processes and over Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from gemray_cluster.gang.client import GangState, GangUnavailable
from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.gang import Gang
from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_cluster.ray_runtime.launcher import RayGang
from gemray_cluster.ray_runtime.session import RaySession
from gemray_workers.messages import Submit
from gemray_workers.rank.worker import RankWorker
from support.cluster.hanging_worker import SleepingWorker, StrayingWorker
from support.cluster.process_launcher import ProcessLauncher
from support.cluster.survival import surviving_config, surviving_requests
from support.waiting import HANG_S, eventually

pytestmark = pytest.mark.slow

SILENCE_S = 8.0
CLUSTER = ClusterConfig(
    placement_deadline_s=HANG_S, start_deadline_s=HANG_S, heartbeat_deadline_s=SILENCE_S, stop_deadline_s=HANG_S
)
WHO = r"rank {} \(pid \d+ on \S+\) "
SILENT = r"rank 0 was silent for [\d.]+ s \(heartbeat_deadline_s = 8\); "
WAITS = (
    SILENT
    + WHO.format(0)
    + (r"is at gemray_workers\.model\.\S+:\d+ and has been in all_reduce, collective (\d+) of the gang, for [\d.]+ s; ")
)
MakeGang = Callable[[type[RankWorker]], Gang]


@pytest.fixture
async def make_gang(request: pytest.FixtureRequest) -> AsyncIterator[MakeGang]:
    """Two ranks of a tiny model, stopped after the test."""
    config, made = replace(surviving_config("cpu"), collective_timeout_s=HANG_S), list[Gang]()
    if request.param == "ray":
        request.getfixturevalue("local_ray")

    def make(worker: type[RankWorker]) -> Gang:
        served = ServedCheckpoints()
        if request.param == "ray":
            session = RaySession(CLUSTER, owned=False)
            made.append(RayGang(session, CLUSTER, config, served=served, worker_class=worker))
        else:
            made.append(Gang(ProcessLauncher(config, worker), CLUSTER, config, served))
        return made[-1]

    yield make
    for gang in made:
        await gang.stop()


async def stream(gang: Gang, submit: Submit, into: list[int]) -> None:
    async for delta in gang.generate(submit):
        into += delta.token_ids


async def serve_until_it_fails(gang: Gang, *, seen: list[int]) -> str:
    """Its account of why."""
    with pytest.raises(GangUnavailable):
        await stream(gang, surviving_requests("cpu")[0], seen)
    assert await asyncio.wait_for(gang.wait_ended(), HANG_S) is GangState.FAILED
    assert gang.failure is not None
    return gang.failure


@pytest.mark.parametrize("make_gang", ["processes", "ray"], indirect=True)
async def test_a_rank_that_sleeps_is_named_with_its_stack(
    make_gang: MakeGang, caplog: pytest.LogCaptureFixture
) -> None:
    gang = make_gang(SleepingWorker)
    await gang.launch()
    with caplog.at_level(logging.ERROR):
        failure = await serve_until_it_fails(gang, seen=[])
    missed = r"is at gemray_workers\.model\.\S+:\d+ and did not come to collective \1 of the gang, having begun \d+"
    assert re.fullmatch(WAITS + WHO.format(1) + missed, failure), failure
    (told,) = (record.getMessage() for record in caplog.records if "before they are ended" in record.getMessage())
    first, second = told.split("\nrank 1 ")
    assert "gemray_workers.parallel.torch_communicator.TorchCommunicator.all_reduce:" in first
    assert "support.cluster.hanging_worker.SleepingWorker.hang:" in second
    assert "gemray_workers.engine.cycle.Cycle.forward:" in second


@pytest.mark.parametrize("make_gang", ["processes"], indirect=True)
async def test_a_rank_in_another_collective_is_named_with_it(make_gang: MakeGang) -> None:
    gang = make_gang(StrayingWorker)
    await gang.launch()
    failure = await serve_until_it_fails(gang, seen=[])
    strays = r"is at \S+ and has been in barrier, collective \1 of the gang, for [\d.]+ s"
    assert re.fullmatch(WAITS + WHO.format(1) + strays, failure), failure


@pytest.mark.parametrize("make_gang", ["processes", "ray"], indirect=True)
async def test_a_rank_that_is_stopped_is_named_as_such(make_gang: MakeGang) -> None:
    gang, seen = make_gang(RankWorker), list[int]()
    await gang.launch()
    pid = (await gang._ranks[1].call(RankWorker.facts)).pid
    serving = asyncio.create_task(serve_until_it_fails(gang, seen=seen))
    await eventually(lambda: len(seen) > 3 or serving.done())
    os.kill(pid, signal.SIGSTOP)
    failure = await serving
    stopped = rf"rank 1 \(pid {pid} on \S+\) gives no answer: its process is stopped, as by SIGSTOP"
    assert re.search(stopped, failure), failure
    assert re.match(SILENT + WHO.format(0), failure), failure
