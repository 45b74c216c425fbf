"""A real (tiny) model over two ranks, launched by Ray and by plain processes: the ids of one rank alone."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from gemray_cluster.gang.client import GangState, GangUnavailable
from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.gang import Gang
from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_cluster.ray_runtime.launcher import RayGang
from gemray_cluster.ray_runtime.session import RaySession
from gemray_workers.errors import CheckpointError, CommunicationError, InvalidField
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.worker import RankWorker
from support.checkpoints.tiny import tiny_checkpoint
from support.cluster.process_launcher import ProcessLauncher
from support.cluster.slow_worker import DELAY_S, SlowWorker, StuckWorker
from support.engine.engine_runner import engine_config, request, run_engine
from support.waiting import HANG_S

CONFIG = ClusterConfig(
    placement_deadline_s=HANG_S, start_deadline_s=HANG_S, heartbeat_deadline_s=HANG_S, stop_deadline_s=HANG_S
)
SAMPLED = {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "seed": 2**63 + 5}
REQUESTS = [
    request("short", [2, 5, 7], 12),
    request("long", [2, *(3 + i * 7 % 250 for i in range(40))], 12),
    request("sampled", [2, 9, 11, 13], 12, **SAMPLED),
]


@pytest.fixture(params=["processes", "ray"])
def launcher(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("local_ray")
    launcher: str = request.param
    return launcher


def make_gang(launcher: str, model: Path | str) -> Gang:
    engine = engine_config(model, tensor_parallel_size=2, collective_timeout_s=HANG_S)
    if launcher == "ray":
        return RayGang(RaySession(CONFIG, owned=False), CONFIG, engine, served=ServedCheckpoints())
    return Gang(ProcessLauncher(engine), CONFIG, engine, ServedCheckpoints())


async def ids_of(gang: Gang, submit: Submit) -> list[int]:
    return [token async for delta in gang.generate(submit) for token in delta.token_ids]


async def test_ids_are_those_of_one_rank_and_a_death_is_noticed(launcher: str) -> None:
    model = tiny_checkpoint("E2B")
    alone = run_engine(SoloCommunicator(), engine_config(model), REQUESTS)
    assert alone is not None
    gang = make_gang(launcher, model)
    await gang.launch()
    try:
        assert [r.rank for r in gang.info.ranks] == [0, 1]
        assert gang.info.model.tensor_parallel_size == 2
        together = await asyncio.gather(*(ids_of(gang, r) for r in REQUESTS))
        assert dict(zip((r.request_id for r in REQUESTS), together, strict=True)) == alone.ids

        # A coordinator that lost its gang half-way replays what it has: the rest is the same.
        full = alone.ids["sampled"]
        replay = Submit(request_id="again", prompt_ids=[2, 9, 11, 13], params=REQUESTS[2].params, emitted_ids=full[:5])
        assert await ids_of(gang, replay) == full[5:]

        stream = gang.generate(request("endless", [2, 4], 200, stop_token_ids=()))
        await anext(stream)
        os.kill(await pid_of_last_rank(gang), signal.SIGKILL)
        with pytest.raises(GangUnavailable):
            async for _ in stream:
                pass
        assert await asyncio.wait_for(gang.wait_ended(), HANG_S) is GangState.FAILED
        assert gang.failure is not None
        assert gang.failure.startswith("rank 1: its process died")
    finally:
        await gang.stop()


async def pid_of_last_rank(gang: Gang) -> int:
    facts = await gang._ranks[-1].call(RankWorker.facts)  # answers while `run` blocks
    assert psutil.pid_exists(facts.pid)
    return facts.pid


async def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    gang = make_gang("processes", tmp_path)
    with pytest.raises((CheckpointError, InvalidField), match=str(tmp_path)):
        await gang.launch()
    assert gang.state is GangState.FAILED


async def test_ranks_that_start_at_different_speeds_wait_for_each_other() -> None:
    """Longer than a collective may take in a step."""
    engine = engine_config(tiny_checkpoint("E2B"), tensor_parallel_size=2, collective_timeout_s=DELAY_S * 0.8)
    gang = Gang(ProcessLauncher(engine, SlowWorker), CONFIG, engine, ServedCheckpoints())
    await gang.launch()
    try:
        assert len(await ids_of(gang, REQUESTS[0])) == 12
    finally:
        await gang.stop()


async def test_ranks_wait_for_each_other_no_longer_than_a_start_may_take() -> None:
    engine = engine_config(tiny_checkpoint("E2B"), tensor_parallel_size=2, start_deadline_s=30.0)
    gang = Gang(ProcessLauncher(engine, StuckWorker), CONFIG, engine, ServedCheckpoints())
    with pytest.raises(CommunicationError, match=r"rank 1 of 2 had not loaded its weights 30 s after rank 0"):
        await gang.launch()
