"""Requests that are large for nothing: refused before anything is built from them, while a neighbour is served."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.limits import MAX_TOKENIZE_BYTES
from gemray_cluster.server.text_work import MAX_LONG_BYTES_OF_CALLER, SHORT_BYTES
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.bad_client import tokenize_at_once
from support.cluster.fake_gang import FakeGang, Script, gang_info
from support.cluster.neighbour import neighbour
from support.cluster.serving import Serving, bad_request_of, retry_delay_of, serving
from support.waiting import HANG_S, eventually

MIB = 1 << 20
MANUAL = "The manual of the printer says that one should not. "
SERVICE = "/gemray.v1.GenerationService/"


def varint(value: int) -> bytes:
    digits = b""
    while value > 127:
        digits += bytes([value & 127 | 128])
        value >>= 7
    return digits + bytes([value])


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field as it travels."""
    return varint(number << 3 | 2) + varint(len(content)) + content


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Serving]:
    async with serving(tokenizer, FakeGang(Script([120, 121, 106]), gang_info(max_model_len=131_072))) as running:
        yield running


async def send(served: Serving, method: str, data: bytes) -> bytes:
    """A call with a request that is bytes already."""
    channel: Any = served.channel  # its stubs ask for serializers, which this call does without
    return await channel.unary_unary(SERVICE + method)(data, timeout=HANG_S)


USER = pb.ChatMessage(role="user", content="Hi")

BYTES = [
    pytest.param("Generate", field(4, field(1, b"") * 1_000_000), "more than 10000 messages", id="a million messages"),
    pytest.param("Generate", field(4, field(1, b"") * 7_000_000), "more than 10000 messages", id="seven million"),
    pytest.param("Tokenize", field(2, field(1, b"") * 1_000_000), "more than 10000 messages", id="million to tokenize"),
    pytest.param("Tokenize", field(2, field(1, b"") * 9_000), "at most 8192", id="fewer to tokenize"),
    pytest.param("Generate", field(4, b"") * 8_000_000, "more than 10000 messages", id="eight million chats"),
    pytest.param("Generate", field(3, b"\x08\x07" * 4_000_000), "more than 300000", id="ids that are not packed"),
    pytest.param("Generate", field(3, field(1, b"\x07" * 15_000_000)), "15000000 tokens", id="15 million ids"),
    pytest.param(
        "Generate",
        field(2, b"Hi") + field(5, field(8, b"x") * 1_000_000),
        "more than 300000",
        id="million stops",
    ),
    pytest.param("Generate", field(2, b"x " * 7_000_000), "14000000 bytes", id="a text that no model fits"),
    pytest.param(
        "Generate",
        field(4, field(1, USER.SerializeToString()) + field(2, b"[" * 2 * MIB)),
        "at most 1048576",
        id="tools of megabytes",
    ),
]

UNREADABLE = [
    pytest.param(b"\xff", id="half a tag"),
    pytest.param(b"\x12\x05Hi", id="text cut off"),
    pytest.param(field(2, b"\xff\xfe"), id="text that is no UTF-8"),
    pytest.param(field(4, field(1, b"\xff")) + field(2, field(1, b"\xff")), id="damaged message"),
    pytest.param(b"\x0b" * 700_000, id="groups"),
    pytest.param(b"\x80" * 700_000, id="a number without end"),
    pytest.param(b"\x10\x01" * 30_000 + b"\xff" * 700_000, id="damage at the end"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("method", "data", "words"), BYTES)
async def test_refused_while_a_neighbour_is_served(served: Serving, method: str, data: bytes, words: str) -> None:
    async with neighbour(served.server.address):
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await send(served, method, data)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in bad_request_of(caught.value)[1]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Tokenize", "GetModelInfo", "GetServerStats"])
@pytest.mark.parametrize("data", UNREADABLE)
async def test_bytes_that_are_no_message(served: Serving, method: str, data: bytes) -> None:
    kind = {"GetModelInfo": pb.GetModelInfoRequest, "GetServerStats": pb.GetServerStatsRequest}.get(method)
    if kind is not None:
        data = b"\xff"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(served, method, data)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert bad_request_of(caught.value)[0] == "request"
    assert await served.stub.Generate(pb.GenerateRequest(text="Hi"))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("role", ["x" * 5000, "漢" * 5000, "\n" * 100_000])
async def test_long_values_come_back_as_a_short_error(served: Serving, role: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Generate(pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role=role)])))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert bad_request_of(caught.value)[0] == "chat.messages[0].role"
    assert f"({len(role)} characters)" in bad_request_of(caught.value)[1]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "deep", ["[" * 400_000, '[{"a":' * 60_000 + "1" + "}]" * 60_000, '{"a":' * 500 + "1" + "}" * 500]
)
@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_deep_tools(served: Serving, method: str, deep: str) -> None:
    chat = pb.Chat(messages=[USER], tools_json=deep)
    request: Any = pb.GenerateRequest(chat=chat) if method == "Generate" else pb.TokenizeRequest(chat=chat)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(served.stub, method)(request)
    assert bad_request_of(caught.value)[0] == "chat.tools_json"


@pytest.fixture
def may_encode(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Long texts are cut into tokens once it is set."""
    event, encode = threading.Event(), ChatTokenizer.encode

    def encode_later(self: ChatTokenizer, text: str) -> list[int]:
        if len(text) > SHORT_BYTES:
            event.wait(HANG_S)
        return encode(self, text)

    monkeypatch.setattr(ChatTokenizer, "encode", encode_later)
    yield event
    event.set()


async def test_many_long_tokenize_calls_hold_up_nobody(tokenizer: ChatTokenizer, may_encode: threading.Event) -> None:
    """40 calls of 959 KiB: those that are taken wait for each other, the rest may come again; memory stays bounded."""
    text = (MANUAL * (MIB // len(MANUAL)))[: MAX_TOKENIZE_BYTES - 100]
    most = MAX_LONG_BYTES_OF_CALLER // len(text)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with (
        serving(tokenizer, FakeGang(Script([120, 121, 106]))) as served,
        neighbour(served.server.address) as answers,
    ):
        calls = [asyncio.ensure_future(served.stub.Tokenize(pb.TokenizeRequest(text=text))) for _ in range(40)]
        # No answer until the last call has come: it would make room for one more.
        await eventually(lambda: sum(call.done() for call in calls) >= 40 - most)
        answered = len(answers)
        await eventually(lambda: len(answers) > answered + 3)
        may_encode.set()
        refused = [call for call in calls if call.done()]
        taken = [call for call in calls if call not in refused]
        assert len(taken) == most, "32 MiB of one connection"
        assert {call.exception().code() for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert {retry_delay_of(call.exception()) for call in refused} == {1}
        await eventually(lambda: sum(call.done() for call in taken) >= 2)
        assert len({len(call.result().token_ids) for call in taken if call.done()}) == 1
        for call in taken:
            call.cancel()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 700 << 10


@pytest.mark.asyncio(loop_scope="module")
async def test_many_short_tokenize_calls_hold_up_nobody(served: Serving) -> None:
    """1,000 of 15 KiB at once: more than a quarter of the generations' places are not held at one time."""
    async with neighbour(served.server.address):
        ended = await tokenize_at_once(served.server.address, MANUAL * 300, 1000)
    assert ended.total() == 1000
    assert ended.keys() <= {"OK", "RESOURCE_EXHAUSTED"}
    assert ended["OK"] >= served.server.limiter.limit // 4
    assert await served.stub.Tokenize(pb.TokenizeRequest(text="Hi"))


@pytest.mark.asyncio(loop_scope="module")
async def test_chats_as_large_as_allowed_hold_up_nobody(served: Serving) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x<turn|>")] * 8192)
    async with neighbour(served.server.address):
        calls = [served.stub.Tokenize(pb.TokenizeRequest(chat=chat)) for _ in range(3)]
        answers = await asyncio.gather(*calls)
    assert len({bytes(answer.SerializeToString()) for answer in answers}) == 1
    assert list(answers[0].token_ids).count(106) == 8192


async def test_cancelled_calls_give_their_places_back(tokenizer: ChatTokenizer, may_encode: threading.Event) -> None:
    """One whose text is worked on, which goes on, and those that wait for their turn behind it."""
    async with serving(tokenizer, FakeGang(), max_live_requests=8) as served:
        limiter = served.server._service._tokenizing
        long = pb.TokenizeRequest(text=MANUAL * 4000)
        for _ in range(3):
            calls = [served.stub.Tokenize(long) for _ in range(limiter.limit)]
            await eventually(lambda: limiter.active == limiter.limit)
            with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
                await served.stub.Tokenize(long)
            for call in calls:
                call.cancel()
            await eventually(lambda: limiter.active == 0)
        assert (await served.stub.Tokenize(pb.TokenizeRequest(text="Hi"))).token_ids
        may_encode.set()
        assert (await served.stub.Tokenize(long)).token_ids
