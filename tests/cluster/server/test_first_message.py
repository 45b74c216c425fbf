"""Calls that end, or stay open, without a request message get an answer even if their clients set no deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server import first_message
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.serving import bad_request_of, serving
from support.waiting import HANG_S

SERVICE = "/gemray.v1.GenerationService/"
HEALTH = "/grpc.health.v1.Health/"
UNARY = [SERVICE + name for name in ("Generate", "Tokenize", "GetModelInfo", "GetServerStats")] + [HEALTH + "Check"]
STREAMED = [SERVICE + "GenerateStream", HEALTH + "Watch"]


async def no_messages() -> AsyncIterator[bytes]:
    """END_STREAM and nothing before it."""
    for message in list[bytes]():
        yield message


async def silence() -> AsyncIterator[bytes]:
    """A call that stays open and says nothing."""
    await asyncio.sleep(3600)
    yield b""


def call(channel: Any, method: str, requests: AsyncIterator[bytes]) -> Any:
    """As a client that knows nothing of the method would; no deadline."""
    raw: Any = channel  # as bytes, without serializers, which the stubs ask for
    if method in STREAMED:
        return raw.stream_stream(method)(requests).read()
    return raw.stream_unary(method)(requests)


@pytest.mark.parametrize("method", UNARY + STREAMED)
async def test_an_end_without_a_message_is_answered(tokenizer: ChatTokenizer, method: str) -> None:
    async with serving(tokenizer, FakeGang(Script([180, 106]))) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call(served.channel, method, no_messages()), HANG_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert bad_request_of(caught.value) == (
            "request", "request = none is not allowed: one message before the call's end",
        )  # fmt: skip
        assert (await served.stub.Generate(pb.GenerateRequest(text="Hi"))).text == "H"
        assert served.server.limiter.active == 0


@pytest.mark.parametrize("method", [SERVICE + "Generate", SERVICE + "GenerateStream"])
async def test_a_call_that_stays_silent_is_ended(
    tokenizer: ChatTokenizer, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_message.FirstMessage.__init__, "__defaults__", (0.3,))
    async with serving(tokenizer, FakeGang()) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call(served.channel, method, silence()), HANG_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "one message within 0.3 s" in bad_request_of(caught.value)[1]
