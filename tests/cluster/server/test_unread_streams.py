"""Clients that do not read give up their places in time, and their requests are counted by outcome."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest
from typing_extensions import override

from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc
from gemray_cluster.server import outbox
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.messages import SequenceDelta, Submit
from support.cluster.fake_gang import FakeGang, Script, gang_info
from support.cluster.serving import Serving, serving
from support.waiting import HANG_S, eventually

HI = pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(max_tokens=4))
UNREAD = pb.GenerateStreamRequest(
    text="Hi", sampling=pb.SamplingParameters(max_tokens=240, ignore_eos=True, logprobs=20)
)

SMALL_WINDOW = (
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
"""Options of a client that takes little before it reads: streams block after a few messages, not after 64 KiB."""


@asynccontextmanager
async def idle_client(served: Serving, number: int) -> AsyncIterator[list[Any]]:
    """Streams whose client does not read."""
    async with grpc.aio.insecure_channel(served.server.address, options=SMALL_WINDOW) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        calls = [stub.GenerateStream(UNREAD) for _ in range(number)]
        await asyncio.gather(*(call.initial_metadata() for call in calls))
        yield calls


async def test_unread_streams_give_their_places_back(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang(), max_live_requests=8, write_deadline_s=600) as served:
        async with idle_client(served, 8) as calls:
            await eventually(lambda: served.server.limiter.completed == 8)
            assert (await served.stub.Generate(HI, timeout=HANG_S)).request_id
            answers = [[message async for message in call] for call in calls]
        assert all(answer[-1].final.usage.completion_tokens == 240 for answer in answers), "nothing was lost"


async def test_a_drain_waits_for_what_is_not_read_yet(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang(), write_deadline_s=HANG_S, drain_deadline_s=HANG_S) as served:
        async with idle_client(served, 2) as calls:
            await eventually(lambda: served.server.limiter.completed == 2)
            draining = asyncio.create_task(served.server.drain())
            await asyncio.sleep(0)
            assert served.server.limiter.active == 0
            assert not draining.done()
            answers = [[message async for message in call] for call in calls]
        assert [answer[-1].final.usage.completion_tokens for answer in answers] == [240, 240]
        assert await draining == 0


async def test_a_cancelled_stream_that_is_not_read_is_no_fault(
    tokenizer: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    gang = FakeGang(Script(stalls_after=100))  # more than a small window takes
    async with serving(tokenizer, gang) as served:
        async with idle_client(served, 20) as calls:
            await eventually(lambda: gang.num_stalled == 20)
            for call in calls:
                call.cancel()
        await eventually(lambda: served.server.limiter.active == 0)
        assert (served.server.limiter.cancelled, served.server.limiter.failed) == (20, 0)
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


class PacedGang(FakeGang):
    """Is no more than so many positions of a prompt ahead of a client that reads."""

    positions_ahead: int | None = 256
    """None: as many as it has."""
    num_read = 0

    @override
    async def generate(self, submit: Submit) -> AsyncGenerator[SequenceDelta, None]:
        num_given = 0
        async with aclosing(super().generate(submit)) as deltas:
            async for delta in deltas:
                num_given += len(delta.prompt_logprobs or ())
                if self.positions_ahead is not None:
                    await eventually(partial(self._has_read, num_given - self.positions_ahead))
                yield delta

    def _has_read(self, num_positions: int) -> bool:
        return self.num_read >= num_positions


async def test_what_a_stream_keeps_for_its_client_is_bounded(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 log-probabilities for each of 8,000 positions are 2.5 MB; a client that reads gets them all."""
    monkeypatch.setattr(outbox, "MOST_UNREAD_BYTES", 200_000)
    gang = PacedGang(Script(prompt_chunk=64), gang_info(max_model_len=8192))
    sampling = pb.SamplingParameters(max_tokens=2, prompt_logprobs=20)
    request = pb.GenerateStreamRequest(token_ids=pb.TokenIds(ids=[150] * 8000), sampling=sampling)
    async with serving(tokenizer, gang, write_deadline_s=600) as served:
        async for message in served.stub.GenerateStream(request):
            gang.num_read += len(message.delta.prompt_logprobs)
        assert gang.num_read == 7999
        gang.positions_ahead = None
        async with grpc.aio.insecure_channel(served.server.address, options=SMALL_WINDOW) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.GenerateStream(request)
            await call.initial_metadata()
            await eventually(lambda: served.server.limiter.failed == 1)
            assert served.server.limiter.active == 0
            assert len(gang.cancelled) == 1, "the engine is told to stop"
            call.cancel()


async def test_an_answer_over_the_limit_counts_as_failed(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang(), max_message_bytes=1 << 16) as served:
        request = pb.GenerateRequest(text="Hi", sampling=UNREAD.sampling)
        with pytest.raises(grpc.aio.AioRpcError, match="max_message_bytes = 65536") as caught:
            await served.stub.Generate(request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (served.server.limiter.completed, served.server.limiter.failed) == (0, 1)


async def test_a_client_that_reads_nothing_loses_its_stream_at_the_write_deadline(tokenizer: ChatTokenizer) -> None:
    endless = FakeGang(Script(delay_s=0.02))
    async with serving(tokenizer, endless, write_deadline_s=0.3) as served:
        async with idle_client(served, 1):
            await eventually(lambda: served.server.limiter.cancelled == 1)
        assert len(endless.cancelled) == 1
