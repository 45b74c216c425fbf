"""`gemray serve` and `gemray demo` with Ray and two tensor-parallel ranks, as a user runs them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc
from support.checkpoints.servable_checkpoint import write_servable_checkpoint
from support.cluster.command import GEMRAY, end_in_order, killed_at_last
from support.cluster.serve_process import START_S, line_with, ranks_of, served, starting
from support.waiting import HANG_S

pytestmark = pytest.mark.slow

END_OF_STREAM: Any = vars(grpc.aio)["EOF"]
"""Not in the stubs."""


async def test_serve_answers_and_drains(tmp_path: Path) -> None:
    model = write_servable_checkpoint(tmp_path / "model")
    async with served(model, "--kv-memory", "auto") as (process, channel):
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

        live = stub.GenerateStream(
            pb.GenerateStreamRequest(text="import this", sampling={"ignore_eos": True, "max_tokens": 60})
        )
        newest = await live.read()
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches every process of the terminal's group
        while (message := await live.read()) is not END_OF_STREAM:
            newest = message
        assert newest.final.usage.completion_tokens == 60, "draining lets it finish"
        assert await asyncio.wait_for(process.wait(), HANG_S) == 0


def is_idle(stats: pb.GetServerStatsResponse) -> bool:
    nothing_runs = (stats.requests.active, stats.engine.num_running) == (0, 0)
    return nothing_runs and all(pool.pages_in_use == 0 for pool in stats.engine.pools)


async def test_a_killed_rank_costs_a_pause(tmp_path: Path) -> None:
    model = write_servable_checkpoint(tmp_path / "model")
    sampling = pb.SamplingParameters(seed=7, max_tokens=200, ignore_eos=True, logprobs=1)
    request = pb.GenerateStreamRequest(text="import this", sampling=sampling)
    async with served(model) as (process, channel):
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


async def test_without_rebuilds_a_killed_rank_ends_the_server(tmp_path: Path) -> None:
    async with starting(write_servable_checkpoint(tmp_path / "model"), "--tp", "1", "--max-rebuilds", "0") as process:
        await asyncio.wait_for(line_with(process, "ready: serving"), START_S)
        (rank,) = ranks_of(process)
        rank.kill()
        line = await asyncio.wait_for(line_with(process, "error: "), HANG_S)
        assert line.startswith(f"error: the gang failed: rank 0: its process died (pid {rank.pid}")
        assert await asyncio.wait_for(process.wait(), HANG_S) == 1


async def test_demo_with_openais_api() -> None:
    """What `make openai` runs."""
    process = await asyncio.create_subprocess_exec(
        *GEMRAY, "demo", "--openai", "--http-port", "0", stderr=asyncio.subprocess.PIPE
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
    process = await asyncio.create_subprocess_exec(
        *GEMRAY, "demo", "--max-tokens", "8", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
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
