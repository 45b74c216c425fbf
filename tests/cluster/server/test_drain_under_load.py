"""A drain under load: calls end whole, refused before they began, or cut at the deadline, and in no other way."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.server.server import GenerationServer
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.chaos.calls import CUT, CUT_BY_DRAIN, REFUSED, WHOLE, Callers
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.serving import reader_of, serving
from support.waiting import HANG_S, eventually

CALLERS = 20


@pytest.mark.parametrize(("notice_s", "deadline_s"), [(0.0, HANG_S), (0.0, 0.3), (HANG_S, 0.3)])
async def test_calls_end_in_three_ways(tokenizer: ChatTokenizer, notice_s: float, deadline_s: float) -> None:
    asked = [
        pb.GenerateStreamRequest(text="Hi", sampling={"seed": i, "max_tokens": 8 * (i + 1), "ignore_eos": True})
        for i in range(CALLERS)
    ]
    gang = FakeGang(Script(delay_s=0.01))
    async with serving(tokenizer, gang, drain_notice_s=notice_s, drain_deadline_s=deadline_s) as served:
        callers = Callers(served.server.address, asked)
        try:
            await eventually(lambda: callers.num_begun >= CALLERS // 2)
            num_cut = await served.server.drain()
            await eventually(lambda: callers.num_begun == 0 and callers.ended[REFUSED] > 0)
            await callers.end(HANG_S)
        finally:
            await callers.cancel()
    assert callers.cut == []
    assert callers.ended[CUT] == 0
    assert served.server.limiter.cancelled == 0, "no call that was taken"
    if deadline_s == HANG_S:
        assert (num_cut, callers.ended[CUT_BY_DRAIN]) == (0, 0)
        assert callers.ended[WHOLE] >= CALLERS // 2
    else:
        assert 0 < callers.ended[CUT_BY_DRAIN] <= num_cut, "one may have been sent its last message just before"


class SendingContext:
    """gRPC's of one call whose metadata is sent when `may_send` is set; it takes no status before, and says so."""

    def __init__(self) -> None:
        self.is_sending = False
        self.may_send = asyncio.Event()
        self.status: grpc.StatusCode | None = None

    async def send_initial_metadata(self, _: Any) -> None:
        self.is_sending = True
        await self.may_send.wait()
        self.is_sending = False

    async def abort(self, code: grpc.StatusCode, details: str, _: Any) -> None:
        assert not self.is_sending, "GRPC_CALL_ERROR_TOO_MANY_OPERATIONS"
        self.status = code
        raise grpc.aio.AbortError(details)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_call_that_is_cut_while_its_metadata_is_sent_gets_its_status(
    tokenizer: ChatTokenizer, method: str
) -> None:
    """On a busy machine sending takes a while; without a status its client would wait for ever."""
    server, context = GenerationServer(ServerConfig(port=0), FakeGang(), reader_of(tokenizer)), SendingContext()
    request = pb.GenerateRequest(text="Hi") if method == "Generate" else pb.GenerateStreamRequest(text="Hi")
    call = asyncio.create_task(getattr(server._service, method)(request, context))
    await eventually(lambda: context.is_sending)
    assert server._calls.cut("the server ends") == 1
    await asyncio.sleep(0)
    context.may_send.set()
    with pytest.raises(grpc.aio.AbortError, match="the server ends"):
        await call
    assert context.status is grpc.StatusCode.UNAVAILABLE
    await server.close()
