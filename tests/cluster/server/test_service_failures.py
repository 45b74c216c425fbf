"""Cancels, deadlines, full queues and engine faults: the right status each time, and the server lives on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc
import pytest
from typing_extensions import override

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.gang.client import GangState, NoLongerFits
from gemray_cluster.gang.gang import no_listener
from gemray_cluster.gang.launcher import ProgressListener
from gemray_cluster.gang.router import Router
from gemray_cluster.gang.scaling import ReplicaLimits
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.messages import SequenceDelta, Submit
from support.cluster.deadlines import until_taken
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.serving import Serving, retry_delay_of, serving
from support.waiting import eventually

ENDLESS = Script([180] * 250, stalls_after=5)
HI = pb.GenerateRequest(text="Hi")
HI_STREAM = pb.GenerateStreamRequest(text="Hi")


async def assert_idle_and_alive(served: Serving) -> None:
    assert served.gang.num_active == 0
    await eventually(lambda: served.server.limiter.active == 0)
    served.gang.script = Script([180, 106])
    assert (await served.stub.Generate(HI)).text == "H"


async def test_cancelled_stream_stops_the_generation(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang(ENDLESS)) as served:
        call = served.stub.GenerateStream(HI_STREAM)
        for _ in range(3):
            await call.read()
        call.cancel()
        await eventually(lambda: served.gang.cancelled == [served.gang.submitted[0].request_id])
        await assert_idle_and_alive(served)
        assert served.server.limiter.cancelled == 1


async def test_cancelled_unary_call_stops_the_generation(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang(ENDLESS)) as served:
        call = asyncio.ensure_future(served.stub.Generate(HI))
        await eventually(lambda: served.gang.num_active == 1)
        call.cancel()
        await eventually(lambda: len(served.gang.cancelled) == 1)
        await assert_idle_and_alive(served)


@pytest.mark.parametrize("streamed", [False, True])
async def test_deadline(tokenizer: ChatTokenizer, streamed: bool) -> None:
    async with serving(tokenizer, FakeGang(ENDLESS)) as served:

        async def ask(deadline_s: float) -> None:
            request = (
                served.stream(HI_STREAM, timeout=deadline_s)
                if streamed
                else served.stub.Generate(HI, timeout=deadline_s)
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await request
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

        await until_taken(served.gang, ask)
        await eventually(lambda: len(served.gang.cancelled) == len(served.gang.submitted))
        await assert_idle_and_alive(served)


class ShrunkGang(FakeGang):
    """Has failed under the request, and was rebuilt with less memory."""

    @override
    async def generate(self, submit: Submit) -> AsyncGenerator[SequenceDelta, None]:
        yield SequenceDelta(request_id=submit.request_id, token_ids=[180])
        raise NoLongerFits("the one in its place has memory for 12 tokens a request")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_that_no_longer_fits_says_so(tokenizer: ChatTokenizer, streamed: bool) -> None:
    async with serving(tokenizer, ShrunkGang()) as served:
        with pytest.raises(grpc.aio.AioRpcError, match="memory for 12 tokens a request") as caught:
            await (served.stream(HI_STREAM) if streamed else served.stub.Generate(HI))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await eventually(lambda: served.server.limiter.active == 0)


async def test_closed_connection_stops_the_generation(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang(ENDLESS)) as served:
        async with grpc.aio.insecure_channel(served.server.address) as other:
            call = Serving(served.server, served.gang, other).stub.GenerateStream(HI_STREAM)
            await call.read()
        await eventually(lambda: len(served.gang.cancelled) == 1)
        await assert_idle_and_alive(served)


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        (Script([180] * 9, fault_after=3), grpc.StatusCode.INTERNAL, "the logits hold NaN"),
        (Script([180] * 9, fault_after=0), grpc.StatusCode.INTERNAL, "the logits hold NaN"),
        (Script([180] * 9, hush_after=3), grpc.StatusCode.INTERNAL, "without a reason"),
        (Script([180] * 9, die_after=3), grpc.StatusCode.UNAVAILABLE, "rank 1 died"),
    ],
    ids=["fault", "fault at once", "hush", "death"],
)
async def test_a_stream_that_fails_never_ends_ok(
    tokenizer: ChatTokenizer, script: Script, code: grpc.StatusCode, words: str
) -> None:
    async with serving(tokenizer, FakeGang(script)) as served:
        call = served.stub.GenerateStream(HI_STREAM)
        received = []
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            received.extend([message async for message in call])
        assert caught.value.code() is code
        assert all(message.WhichOneof("event") == "delta" for message in received)
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await served.stub.Generate(HI)
        assert caught.value.code() is code
        assert served.server.limiter.failed == 2
        await assert_idle_and_alive(served)


async def test_unexpected_error_is_internal_and_tells_no_secrets(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang = FakeGang()
    monkeypatch.setattr(gang, "generate", lambda submit: 1 / 0)
    async with serving(tokenizer, gang) as served:
        with pytest.raises(grpc.aio.AioRpcError, match="the server's log has the details") as caught:
            await served.stub.Generate(HI)
        assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_full_queue(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang(ENDLESS), max_live_requests=2) as served:
        calls = [served.stub.GenerateStream(HI_STREAM) for _ in range(2)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Generate(HI)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "limit is 2" in (caught.value.details() or "")
        assert retry_delay_of(caught.value) > 0
        stats = await served.stub.GetServerStats(pb.GetServerStatsRequest())
        assert (stats.requests.active, stats.requests.limit, stats.requests.rejected) == (2, 2, 1)
        for call in calls:
            call.cancel()
        await eventually(lambda: served.server.limiter.active == 0)
        await assert_idle_and_alive(served)


@pytest.mark.parametrize("state", [GangState.STARTING, GangState.FAILED, GangState.STOPPED])
async def test_gang_that_does_not_serve(tokenizer: ChatTokenizer, state: GangState) -> None:
    gang = FakeGang(state=state, failure="rank 1 died" if state is GangState.FAILED else None)
    async with serving(tokenizer, gang) as served:
        for call in (served.stub.Generate(HI), served.stream(HI_STREAM)):
            with pytest.raises(grpc.aio.AioRpcError, match=gang.failure or state.value) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert retry_delay_of(caught.value) > 0
        stats = await served.stub.GetServerStats(pb.GetServerStatsRequest())
        assert stats.state == pb.ServerState.Value(f"SERVER_STATE_{state.name}")
        assert stats.requests.failed == 0, "none was taken"


class LaunchedGang(FakeGang):
    """A fake that a router can keep."""

    async def launch(self, progress: ProgressListener = no_listener) -> None:
        self.state = GangState.SERVING

    async def wait_ended(self) -> GangState:
        await asyncio.Event().wait()
        return self.state


async def test_server_listens_before_the_gang_is_there(tokenizer: ChatTokenizer) -> None:
    gang, router = LaunchedGang(Script([180, 106])), Router(ReplicaLimits(), max_rebuilds=0)
    async with serving(tokenizer, gang, router=router) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        stats = await served.stub.GetServerStats(pb.GetServerStatsRequest())
        assert stats.state == pb.SERVER_STATE_STARTING
        assert (stats.HasField("engine"), list(stats.replicas)) == (False, [])
        assert (await served.stub.Tokenize(pb.TokenizeRequest(text="Hi"))).token_ids[0] == 2
        await router.start(lambda: gang, slots=1)
        assert (await served.stub.Generate(HI)).text == "H"
        await router.stop()


async def test_many_at_once(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang(Script(group_sizes=(3, 1)))) as served:
        requests = [
            pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(seed=seed % 4, max_tokens=20))
            for seed in range(40)
        ]
        answers = await asyncio.gather(*(served.stub.Generate(request) for request in requests))
        assert len({tuple(answer.token_ids) for answer in answers}) == 4
        assert all(answers[index].token_ids == answers[index % 4].token_ids for index in range(40))
