"""`gemray serve` and `gemray demo` with Ray and two tensor-parallel ranks, as a user runs them.

Three tests share a server, which the last of them ends: with Ray and two ranks it takes 20 s of CPU time to start.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import openai
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc
from gemray_cluster.ray_runtime.session import NOSET_DEVICES
from gemray_workers.rank.waiting_threads import FEW_SPINS, SPINS
from support.checkpoints.servable_checkpoint import write_servable_checkpoint
from support.cluster.command import GEMRAY, end_in_order, killed_at_last
from support.cluster.forked_command import ForkedCommand
from support.cluster.ray_turns import in_turn
from support.cluster.serve_process import START_S, gone, line_with, processes_of, ranks_of, served
from support.cluster.server_streams import reading
from support.waiting import HANG_S, eventually

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

END_OF_STREAM: Any = vars(grpc.aio)["EOF"]
"""Not in the stubs."""


Server = tuple[ForkedCommand, grpc.aio.Channel]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    model = write_servable_checkpoint(tmp_path_factory.mktemp("served") / "model")
    async with AsyncExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NCCL_SOCKET_NTHREADS", "1")
            running = await stack.enter_async_context(served(model, "--kv-memory", "auto"))
        yield running


async def test_serve_answers(server: Server) -> None:
    _, channel = server
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    health: Any = health_pb2_grpc.HealthStub(channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING

    info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert [rank.shard_indices.org_vocab_start_index for rank in info.ranks] == [0, 1024]
    assert [choice.reason for choice in info.choices if choice.what == "KV memory"] == [
        "a quarter of what was free, shared by the ranks of a host"
    ]
    for memory in (rank.memory for rank in info.ranks):
        parts = (memory.weights, memory.drafter, memory.kv, memory.graphs, memory.work, memory.elsewhere)
        assert sum(parts) + memory.headroom == memory.total > 0

    sampling = pb.SamplingParameters(seed=7, max_tokens=24, ignore_eos=True)
    unary = await stub.Generate(pb.GenerateRequest(text="import this", sampling=sampling))
    assert unary.completion.usage.completion_tokens == 24
    deltas = [
        message.delta
        async for message in stub.GenerateStream(pb.GenerateStreamRequest(text="import this", sampling=sampling))
    ]
    assert [token for delta in deltas for token in delta.token_ids] == list(unary.token_ids)
    assert "".join(delta.text for delta in deltas) == unary.text

    too_long = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2] * info.max_model_len))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(too_long)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    cancelled = stub.GenerateStream(pb.GenerateStreamRequest(text="import this", sampling={"ignore_eos": True}))
    await cancelled.read()
    cancelled.cancel()
    async with asyncio.timeout(HANG_S):
        while not is_idle(await stub.GetServerStats(pb.GetServerStatsRequest())):
            await asyncio.sleep(0.1)


def is_idle(stats: pb.GetServerStatsResponse) -> bool:
    nothing_runs = (stats.requests.active, stats.engine.num_running) == (0, 0)
    return nothing_runs and all(pool.pages_in_use == 0 for pool in stats.engine.pools)


async def test_a_killed_rank_costs_a_pause(server: Server) -> None:
    process, channel = server
    sampling = pb.SamplingParameters(seed=7, max_tokens=200, ignore_eos=True, logprobs=1)
    request = pb.GenerateStreamRequest(text="import this", sampling=sampling)
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    undisturbed = [message async for message in stub.GenerateStream(request)]
    last_rank = ranks_of(process)[-1]  # to look for it takes time, in which the answer would go on
    live = stub.GenerateStream(request)
    messages = [await live.read()]
    last_rank.kill()
    while (message := await asyncio.wait_for(live.read(), HANG_S)) is not END_OF_STREAM:
        messages.append(message)
    assert _joined(messages) == _joined(undisturbed)
    assert messages[-1].final.usage.completion_tokens == 200
    line = await asyncio.wait_for(line_with(process, "rebuilding the gang"), HANG_S)
    assert line.endswith("live requests: 1\n"), "the rank died in the middle"


def _joined(messages: list[Any]) -> tuple[list[int], str, list[int]]:
    """Ids, text, and the ids that have a log-probability."""
    deltas = [message.delta for message in messages if message.HasField("delta")]
    return (
        [token for delta in deltas for token in delta.token_ids],
        "".join(delta.text for delta in deltas),
        [logprob.token_id for delta in deltas for logprob in delta.logprobs],
    )


async def test_a_signal_to_the_group_loses_no_stream(server: Server) -> None:
    """As `timeout` and a terminal send it. Ray has a session of its own, so the drain still has its ranks.

    They have what the server's environment says of interfaces, threads that soon sleep, and its niceness, not Ray's 15.
    """
    process, channel = server
    everything = processes_of(process.pid)
    assert [rank.nice() for rank in ranks_of(process)] == [os.getpriority(os.PRIO_PROCESS, process.pid)] * 2
    environments = [rank.environ() for rank in ranks_of(process)]
    names = ("NCCL_SOCKET_NTHREADS", NOSET_DEVICES, SPINS)
    assert [[each[name] for name in names] for each in environments] == [["1", "1", FEW_SPINS]] * 2
    (expected,) = [await reader.read_on() for reader in await reading(channel, 1)]
    readers = await reading(channel, 20)
    process.send_signal(signal.SIGHUP)  # as some send it for a reload
    os.killpg(process.pid, signal.SIGTERM)
    found = await asyncio.wait_for(asyncio.gather(*(reader.read_on() for reader in readers)), HANG_S)
    assert found[0] == expected
    assert await asyncio.wait_for(process.wait(), HANG_S) == 0
    await eventually(lambda: gone(everything))


async def test_demo_with_openais_api() -> None:
    """What `make openai` runs."""
    process = await in_turn(
        asyncio.create_subprocess_exec(*GEMRAY, "demo", "--openai", "--http-port", "0", stderr=asyncio.subprocess.PIPE)
    )
    async with killed_at_last(process):
        line = await asyncio.wait_for(line_with(process, "ready: http"), START_S)
        async with openai.AsyncOpenAI(base_url=line.split()[1], api_key="none", timeout=HANG_S) as client:
            (model,) = [model.id async for model in client.models.list()]
            asked: Any = {"role": "user", "content": "What is a tuple?"}
            answer = await client.chat.completions.create(model=model, messages=[asked], max_tokens=4)
        assert answer.usage is not None
        assert 1 <= answer.usage.completion_tokens <= 4
        await end_in_order(process)


async def test_demo() -> None:
    process = await in_turn(
        asyncio.create_subprocess_exec(
            *GEMRAY, "demo", "--max-tokens", "8", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    )
    out, err = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode == 0, err.decode()
    answers = out.decode().strip()
    assert len(answers) % 3 == 2, "three equal answers, a line break between them"
    assert answers == "\n".join([answers[: len(answers) // 3]] * 3)
    report = err.decode()
    assert report.startswith("question: Write a Python function")
    assert report.count("vocabulary rows by rank 0..2048, 2048..4096") == 3
    assert [line.split()[:2] for line in report.splitlines() if line.rstrip().endswith("equal")] == [
        ["none", "8"],
        ["mtp", "8"],
        ["dflash", "8"],
    ]
