"""A call that arrives while the server tells its connection to go away.

gRPC's core ends it with CANCELLED, and the client takes it for what it is: a call that was not taken.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from gemray.client import AsyncClient, Client, ClientClosed, Retry, ServerUnreachable
from gemray.v1 import generation_pb2 as pb
from support.waiting import HANG_S

NEVER = Retry(first_s=0, resume_s=0)
AT_ONCE = Retry(delay_s=0.001, max_delay_s=0.001)
REQUEST = pb.GenerateStreamRequest(text="Hello", sampling=pb.SamplingParameters(seed=7))
FINAL = pb.GenerateStreamResponse(final=pb.Completion())


class GoingAway:
    """Ends so many calls as gRPC's core does where it has not taken them, and answers the others; each of them when
    `may_answer` is set."""

    def __init__(self) -> None:
        self.num_left = 0
        self.num_calls = 0
        self.asked = threading.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.address = ""

    def handlers(self) -> list[Any]:
        one = grpc.unary_unary_rpc_method_handler(self._one)
        stream = grpc.unary_stream_rpc_method_handler(
            self._stream, response_serializer=pb.GenerateStreamResponse.SerializeToString
        )
        services = {
            "gemray.v1.GenerationService": {"Generate": one, "GenerateStream": stream},
            "grpc.health.v1.Health": {"Check": one},
        }
        return [grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items()]

    async def _stream(self, request: bytes, context: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
        await self._one(request, context)
        yield FINAL

    async def _one(self, _request: bytes, context: Any) -> bytes:
        self.num_calls += 1
        self.asked.set()
        await self.may_answer.wait()
        if self.num_left:
            self.num_left -= 1
            await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        return b""


@pytest_asyncio.fixture
async def going_away() -> AsyncIterator[GoingAway]:
    running = GoingAway()
    server = grpc.aio.server(handlers=running.handlers())
    running.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield running
    await server.stop(None)


CALLS: list[Callable[[Client], object]] = [
    lambda client: list(client.stream(REQUEST)),
    lambda client: client.generate(pb.GenerateRequest(text="Hello")),
    lambda client: client.is_serving(),
]


async def read(client: AsyncClient) -> list[pb.GenerateStreamResponse]:
    return [message async for message in client.stream(REQUEST)]


@pytest.mark.parametrize("call", CALLS)
async def test_a_thread_is_told_unavailable(going_away: GoingAway, call: Callable[[Client], object]) -> None:
    going_away.num_left = 1
    client = Client(going_away.address, retry=NEVER)
    with client, pytest.raises(ServerUnreachable, match="UNAVAILABLE: the server is going away") as caught:
        await asyncio.to_thread(call, client)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_a_loop_is_told_unavailable(going_away: GoingAway) -> None:
    going_away.num_left = 1
    async with AsyncClient(going_away.address, retry=NEVER) as client:
        with pytest.raises(ServerUnreachable, match="UNAVAILABLE: the server is going away") as caught:
            await read(client)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_it_is_asked_again(going_away: GoingAway) -> None:
    going_away.num_left = 2
    async with AsyncClient(going_away.address, retry=AT_ONCE) as client:
        assert await read(client) == [FINAL]
    assert going_away.num_calls == 3


async def test_a_client_that_is_closed_meanwhile_says_so(going_away: GoingAway) -> None:
    going_away.may_answer.clear()
    client = Client(going_away.address, retry=NEVER)
    reading = asyncio.create_task(asyncio.to_thread(lambda: list(client.stream(REQUEST))))
    assert await asyncio.to_thread(going_away.asked.wait, HANG_S)
    client.close()
    with pytest.raises(ClientClosed, match="the client is closed"):
        await reading
