"""A server over a fake gang, and a client of it, on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from gemray.channel_options import client_options
from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc
from gemray_cluster.gang.client import ReplicatedGang
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.server.requests import RequestReader
from gemray_cluster.server.server import GenerationServer
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.checkpoint.generation import GenerationDefaults
from support.cluster.fake_gang import FakeGang
from support.cluster.text import VOCAB_SIZE

DEFAULTS = GenerationDefaults(
    stop_token_ids=(1, 50, 106), temperature=1.0, top_k=64, top_p=0.95, suppress_tokens=(258883,)
)

Metadata = tuple[tuple[str, str], ...]


@dataclass
class Serving:
    """A running server and a channel to it."""

    server: GenerationServer
    gang: FakeGang
    channel: grpc.aio.Channel

    @property
    def stub(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)

    async def stream(self, request: pb.GenerateStreamRequest, **call: Any) -> list[pb.GenerateStreamResponse]:
        return [message async for message in self.stub.GenerateStream(request, **call)]


def joined(messages: Sequence[pb.GenerateStreamResponse]) -> pb.GenerateResponse:
    """What a client makes of a stream: deltas concatenated, then exactly one final message."""
    assert [message.WhichOneof("event") for message in messages] == ["delta"] * (len(messages) - 1) + ["final"]
    whole = pb.GenerateResponse(request_id=messages[-1].request_id, completion=messages[-1].final)
    for message in messages[:-1]:
        delta = message.delta
        whole.token_ids.extend(delta.token_ids)
        whole.text += delta.text
        whole.reasoning += delta.reasoning
        whole.logprobs.extend(delta.logprobs)
        whole.prompt_logprobs.extend(delta.prompt_logprobs)
        for piece in delta.tool_calls:
            if piece.HasField("name"):
                whole.tool_calls.add(id=piece.id, name=piece.name, is_incomplete=True)
            call = whole.tool_calls[piece.index]
            call.arguments_json += piece.arguments_json
            call.is_incomplete &= not piece.is_complete
    return whole


def reader_of(tokenizer: ChatTokenizer, *, vocab_size: int = VOCAB_SIZE) -> RequestReader:
    """A reader for a model of the tokenizer's size."""
    return RequestReader(tokenizer, DEFAULTS, vocab_size)


@asynccontextmanager
async def serving(
    tokenizer: ChatTokenizer,
    gang: FakeGang,
    *,
    router: ReplicatedGang | None = None,
    interceptors: Sequence[Any] = (),
    **config: Any,
) -> AsyncIterator[Serving]:
    """Serve `gang` (or `router`, when the gang comes later) on a free port."""
    reader = reader_of(tokenizer, vocab_size=gang.gang_info.model.vocab_size)
    server = GenerationServer(ServerConfig(port=0, **config), router or gang, reader, interceptors=interceptors)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address, options=client_options(server.address)) as channel:
            yield Serving(server, gang, channel)
    finally:
        await server.close()


def bad_request_of(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """Field and description of the google.rpc.BadRequest in an error."""
    details = error_details_pb2.BadRequest()
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status.details[0].Unpack(details)
    (violation,) = details.field_violations
    return violation.field, violation.description


def retry_delay_of(error: grpc.aio.AioRpcError) -> float:
    """Seconds of the google.rpc.RetryInfo in an error."""
    details = error_details_pb2.RetryInfo()
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status.details[0].Unpack(details)
    return details.retry_delay.seconds + details.retry_delay.nanos / 1e9
