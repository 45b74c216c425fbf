"""A gang's life with workers that have no model, the same over plain processes and over Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from gemray_cluster.gang.client import GangState, GangUnavailable
from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.gang import Gang
from gemray_cluster.gang.launcher import StartProgress
from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_cluster.ray_runtime.launcher import RayGang
from gemray_cluster.ray_runtime.session import RaySession
from gemray_workers.config import EngineConfig
from gemray_workers.errors import CheckpointError
from gemray_workers.messages import SequenceDelta, Submit
from gemray_workers.sampling.params import SamplingParams
from support.cluster.fake_worker import (
    COMPILATION_S,
    COMPILING_PROMPT,
    FAKE_HASH,
    FAULTY,
    HELD,
    NUM_PROGRAMS,
    SILENT_PROMPT,
    FakeWorker,
    expected_token,
)
from support.cluster.process_launcher import ProcessLauncher
from support.waiting import HANG_S, eventually

CONFIG = ClusterConfig(
    placement_deadline_s=HANG_S, start_deadline_s=HANG_S, heartbeat_deadline_s=HANG_S, stop_deadline_s=HANG_S
)
MakeGang = Callable[..., Gang]


def engine_config(model_path: str = "/fake") -> EngineConfig:
    return EngineConfig(
        model_path=model_path, tensor_parallel_size=2, dtype="float32", device="cpu", kv_memory_bytes=1,
        collective_timeout_s=HANG_S,
    )  # fmt: skip


def submit(request_id: str, *, max_tokens: int = 8, prompt: list[int] | None = None, emitted: int = 0) -> Submit:
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, max_tokens=max_tokens)
    already = [expected_token(5, p) for p in range(emitted)]
    return Submit(request_id=request_id, prompt_ids=prompt or [1], params=params, emitted_ids=already)


async def tokens(gang: Gang, request: Submit) -> list[int]:
    deltas = [delta async for delta in gang.generate(request)]
    assert {delta.request_id for delta in deltas} == {request.request_id}
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish == "length"
    return [token for delta in deltas for token in delta.token_ids]


def pid_of(gang: Gang, rank: int) -> int:
    return int(gang.info.ranks[rank].host)  # the fake worker says its process id there


UNDER_RAY_TOO = pytest.mark.parametrize("make_gang", ["processes", "ray"], indirect=True)
"""For what depends on the launcher; the rest runs over processes alone."""


@pytest.fixture
async def make_gang(request: pytest.FixtureRequest) -> AsyncIterator[MakeGang]:
    """Gangs of two ranks that are stopped after the test."""
    launcher = getattr(request, "param", "processes")
    if launcher == "ray":
        request.getfixturevalue("local_ray")
    made: list[Gang] = []
    served = ServedCheckpoints()

    def make(model_path: str = "/fake", config: ClusterConfig = CONFIG) -> Gang:
        engine = engine_config(model_path)
        if launcher == "ray":
            session = RaySession(config, owned=False)
            made.append(RayGang(session, config, engine, served=served, worker_class=FakeWorker))
        else:
            made.append(Gang(ProcessLauncher(engine, FakeWorker), config, engine, served))
        return made[-1]

    yield make
    for gang in made:
        await gang.stop()


@UNDER_RAY_TOO
async def test_starts_serves_and_stops(make_gang: MakeGang) -> None:
    gang = make_gang()
    assert gang.state.value == "starting"
    with pytest.raises(GangUnavailable, match="starting"):
        _ = gang.info
    with pytest.raises(GangUnavailable, match="starting"):
        await tokens(gang, submit("early"))

    stages: list[StartProgress] = []
    await gang.launch(stages.append)
    assert gang.state.value == "serving"
    assert gang.info.model.tensor_parallel_size == 2
    assert [rank.rank for rank in gang.info.ranks] == [0, 1]
    assert pid_of(gang, 0) != pid_of(gang, 1)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert [os.getpriority(os.PRIO_PROCESS, pid_of(gang, rank)) for rank in (0, 1)] == [own] * 2, "Ray would add 15"
    assert [rank.device for rank in gang.info.ranks] == ["cpu:1", "cpu:1"], "OMP_NUM_THREADS holds on each rank"
    assert [p.done for p in stages if p.stage == "load"] == [0, 1, 2]
    assert stages[-1].stage == "ready"

    expected = [expected_token(5, p) for p in range(8)]
    requests = [submit(f"r{i}") for i in range(5)]
    assert await asyncio.gather(*(tokens(gang, r) for r in requests)) == [expected] * 5
    assert await tokens(gang, submit("replayed", emitted=3)) == expected[3:]
    assert gang.stats is not None
    await eventually(lambda: gang.seconds_since_heartbeat < 2)

    pids = [pid_of(gang, 0), pid_of(gang, 1)]
    began = time.monotonic()
    await asyncio.gather(gang.stop(), gang.stop())
    await gang.stop()
    assert time.monotonic() - began < CONFIG.stop_deadline_s, "an idle gang stops in order, not by its deadline"
    assert gang.state is GangState.STOPPED
    await eventually(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids))
    with pytest.raises(GangUnavailable, match="stopped"):
        await tokens(gang, submit("late"))


async def test_the_log_says_where_the_time_of_a_start_went(
    make_gang: MakeGang, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await make_gang().launch()
    assert re.search(r"the gang started in \S+ s: placement .*, load and warm-up ", caplog.text)
    assert "the gang: rank 0 loaded in 1.8 s: weights 1.5, warm-up 0.2" in caplog.text


async def test_requests_of_one_id_do_not_mix(make_gang: MakeGang) -> None:
    gang = make_gang()
    await gang.launch()
    both = await asyncio.gather(tokens(gang, submit("same")), tokens(gang, submit("same", emitted=2)))
    assert list(both) == [[expected_token(5, p) for p in range(8)], [expected_token(5, p) for p in range(2, 8)]]


async def test_leaving_a_stream_cancels_its_request(make_gang: MakeGang) -> None:
    gang = make_gang()
    await gang.launch()

    def running() -> int:
        assert gang.stats is not None
        return gang.stats.num_running

    async with aclosing(gang.generate(submit("closed", max_tokens=10**6))) as stream:
        async for _ in stream:
            break
    task = asyncio.create_task(tokens(gang, submit("cancelled", max_tokens=10**6)))
    await eventually(lambda: running() == 1)
    task.cancel()
    await eventually(lambda: running() == 0)
    assert await tokens(gang, submit("closed")) == [expected_token(5, p) for p in range(8)]


async def collect_until_it_ends(gang: Gang, request: Submit, into: list[SequenceDelta]) -> None:
    async for delta in gang.generate(request):
        into.append(delta)


@pytest.mark.parametrize(
    ("make_gang", "victim"), [("processes", 0), ("processes", 1), ("ray", 1)], indirect=["make_gang"]
)
async def test_a_killed_rank_fails_the_gang_at_once(make_gang: MakeGang, victim: int) -> None:
    gang = make_gang()
    await gang.launch()
    seen: list[SequenceDelta] = []
    stream = asyncio.create_task(collect_until_it_ends(gang, submit("x", max_tokens=10**6), seen))
    await eventually(lambda: len(seen) > 3)
    pids = [pid_of(gang, 0), pid_of(gang, 1)]

    os.kill(pids[victim], signal.SIGKILL)
    with pytest.raises(GangUnavailable, match="the gang failed"):
        await asyncio.wait_for(stream, HANG_S)
    assert gang.state is GangState.FAILED
    with pytest.raises(GangUnavailable, match="failed"):
        await tokens(gang, submit("after"))
    assert await asyncio.wait_for(gang.wait_ended(), HANG_S) is GangState.FAILED
    assert gang.failure is not None
    assert gang.failure.startswith(f"rank {victim}: its process died (pid {pids[victim]}"), gang.failure
    await eventually(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids))
    assert [token for d in seen for token in d.token_ids] == [expected_token(5, p) for p in range(len(seen))]
    await gang.stop()
    assert gang.state is GangState.FAILED, "stopping a failed gang keeps its account"


async def test_the_cause_is_told_and_not_what_another_rank_saw_of_it(
    make_gang: MakeGang, caplog: pytest.LogCaptureFixture
) -> None:
    gang = make_gang(FAULTY)
    await gang.launch()
    with pytest.raises(GangUnavailable, match=r"the gang failed: rank 1: ValueError: what rank 1 did wrong; rank 0: "):
        await asyncio.wait_for(tokens(gang, submit("x", max_tokens=10**6)), HANG_S)
    assert await asyncio.wait_for(gang.wait_ended(), HANG_S) is GangState.FAILED
    assert gang.failure is not None
    assert gang.failure.startswith("rank 1: ValueError: what rank 1 did wrong")
    logged = [record.getMessage() for record in caplog.records if "the gang failed" in record.getMessage()]
    assert logged == [f"the gang failed: {gang.failure}"]


async def test_a_silent_rank_fails_the_gang_at_the_heartbeat_deadline(make_gang: MakeGang) -> None:
    gang = make_gang(config=ClusterConfig(heartbeat_deadline_s=3.0, stop_deadline_s=1))
    await gang.launch()
    assert gang.stats is not None
    heard = gang.stats.step
    await eventually(lambda: gang.stats is not None and gang.stats.step > heard + 3)  # an idle gang is not silent
    with pytest.raises(GangUnavailable, match=r"silent for .*heartbeat_deadline_s = 3\)"):
        await asyncio.wait_for(tokens(gang, submit("hang", prompt=SILENT_PROMPT)), HANG_S)
    await asyncio.wait_for(gang.wait_ended(), HANG_S)
    assert gang.failure is not None
    assert gang.failure.startswith("rank 0 was silent")


async def test_compiling_is_no_silence(make_gang: MakeGang) -> None:
    """As the first request of a rebuilt gang may have to, where the warm-up has left something out."""
    assert NUM_PROGRAMS > 2.7
    gang = make_gang(config=ClusterConfig(heartbeat_deadline_s=COMPILATION_S * 2.7, stop_deadline_s=3))
    await gang.launch()
    assert len(await tokens(gang, submit("compiles", prompt=COMPILING_PROMPT))) == 8
    assert gang.state is GangState.SERVING


async def test_a_gang_that_does_not_stop_is_killed(make_gang: MakeGang) -> None:
    gang = make_gang(config=ClusterConfig(heartbeat_deadline_s=HANG_S, stop_deadline_s=0.5))
    await gang.launch()
    hanging = asyncio.create_task(tokens(gang, submit("hang", prompt=SILENT_PROMPT)))
    await asyncio.sleep(0.3)
    await asyncio.wait_for(gang.stop(), HANG_S)
    assert gang.state is GangState.STOPPED
    with pytest.raises(GangUnavailable, match="stopped"):
        await hanging


async def test_stopping_ends_streams_as_cancelled(make_gang: MakeGang) -> None:
    gang = make_gang()
    await gang.launch()
    seen: list[SequenceDelta] = []
    stream = asyncio.create_task(collect_until_it_ends(gang, submit("x", max_tokens=10**6), seen))
    await eventually(lambda: len(seen) > 0)
    await gang.stop()
    await asyncio.wait_for(stream, HANG_S)
    assert seen[-1].finish == "cancelled"


@UNDER_RAY_TOO
async def test_a_bad_checkpoint_is_raised_as_itself(make_gang: MakeGang) -> None:
    gang = make_gang("/missing")
    with pytest.raises(CheckpointError, match=r"/missing/config\.json: no such file"):
        await gang.launch()
    assert gang.state is GangState.FAILED
    assert gang.failure == "/missing/config.json: no such file"
    await gang.stop()


@UNDER_RAY_TOO
async def test_a_gang_serves_what_the_first_one_did(make_gang: MakeGang, tmp_path: Path) -> None:
    """Requests go on in it: the half of an answer would be another model's."""
    model = str(tmp_path)
    for found, fits in (("f" * 64, True), ("f" * 64, True), ("0" * 64, False), ("f" * 64, True)):
        (tmp_path / FAKE_HASH).write_text(found)
        gang = make_gang(model)
        if fits:
            await gang.launch()
            await gang.stop()
            continue
        with pytest.raises(CheckpointError, match=rf"{model} on .* hash 000000000000, .* hash ffffffffffff"):
            await gang.launch()
        assert gang.state is GangState.FAILED


@UNDER_RAY_TOO
async def test_a_rank_that_dies_while_loading_is_named(make_gang: MakeGang) -> None:
    gang = make_gang("/dies")
    began = time.monotonic()
    with pytest.raises(GangUnavailable, match="rank 1 failed to load: its process died"):
        await gang.launch()
    assert time.monotonic() - began < CONFIG.start_deadline_s, "by its death, not by the deadline"
    assert gang.state is GangState.FAILED


async def test_a_start_that_takes_too_long_says_where_it_stands(make_gang: MakeGang) -> None:
    gang = make_gang("/slow", ClusterConfig(start_deadline_s=4.0))
    stands = r"start_deadline_s = 4: still (loading weights|starting processes); rank 0 .+; rank 1 .+"
    with pytest.raises(GangUnavailable, match=stands):
        await gang.launch()
    assert gang.state is GangState.FAILED


async def test_stopping_while_it_starts(make_gang: MakeGang) -> None:
    gang = make_gang("/slow")
    launching = asyncio.create_task(gang.launch())
    await asyncio.sleep(2.5)
    await asyncio.wait_for(gang.stop(), HANG_S)
    with pytest.raises(asyncio.CancelledError):
        await launching
    assert gang.state is GangState.STOPPED


@pytest.mark.parametrize("make_gang", ["ray"], indirect=True)
async def test_the_event_loop_goes_on_while_ranks_load(make_gang: MakeGang, tmp_path: Path) -> None:
    """They load when it has turned: a launch that stood in its way would never end."""
    may_load, stages = tmp_path / "may load", list[StartProgress]()
    gang = make_gang(f"{HELD}{may_load}")
    launching = asyncio.create_task(gang.launch(stages.append))
    await eventually(lambda: any(progress.stage == "load" for progress in stages) or launching.done())
    may_load.touch()
    await asyncio.wait_for(launching, HANG_S)
    assert len(await tokens(gang, submit("x"))) == 8
