"""The calls: each request alone on one server, and among others and cancelled ones on another."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from gemray.v1 import generation_pb2 as pb
from gemray.v1.generation_pb2_grpc import GenerationServiceStub
from support.equal_answers.comparison import Got, Tally, joined, refusal
from support.equal_answers.drawn import drawn_request
from support.equal_answers.over_http import ask_over_http, can_ask_over_http

CALL_S = 3600.0
"""Longer than any answer takes on a machine that is not stuck."""
MOST_MESSAGE_BYTES = 1 << 26
HOWS = ("unary", "streamed", "resumed", "over HTTP")
"""Ways to ask the busy server; what cannot be asked in one is streamed."""


@asynccontextmanager
async def stub_of(address: str) -> AsyncIterator[Any]:
    """A client of the server at `address`."""
    options = [("grpc.max_receive_message_length", MOST_MESSAGE_BYTES)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield GenerationServiceStub(channel)


@dataclass
class Traffic:
    """Requests of one seed on both servers, compared as soon as both have answered."""

    quiet: Any
    busy: Any
    busy_http: httpx.AsyncClient
    seed: int
    count: int
    most_tokens: int
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        """Wait for no answer yet."""
        self._alone: list[asyncio.Future[Got]] = []
        self._next: Iterator[int] = iter(range(self.count))

    async def run(self, at_a_time: int, cancelling: int) -> AsyncIterator[Tally]:
        """Send all requests; the tally after each comparison.

        Args:
            at_a_time: calls whose answers are compared, on the busy server.
            cancelling: clients beside them that cancel what they have asked for.
        """
        loop = asyncio.get_running_loop()
        self._alone = [loop.create_future() for _ in range(self.count)]
        compared: asyncio.Queue[None] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask_alone())]
            tasks += [group.create_task(self._ask_among(compared)) for _ in range(at_a_time)]
            cancellers = [group.create_task(self._cancel(index)) for index in range(cancelling)]
            try:
                for _ in range(self.count):
                    await compared.get()
                    yield self.tally
            finally:
                for task in (*cancellers, *tasks):
                    task.cancel()

    def _request(self, index: int) -> pb.GenerateRequest:
        return drawn_request(self.seed, index, most_tokens=self.most_tokens)

    async def _ask_alone(self) -> None:
        for index, answer in enumerate(self._alone):
            answer.set_result(await _unary(self.quiet, self._request(index)))

    async def _ask_among(self, compared: asyncio.Queue[None]) -> None:
        for index in self._next:
            request = self._request(index)
            rng = random.Random(f"among {self.seed}/{index}")
            sent = pb.GenerateRequest()
            sent.CopyFrom(request)
            if rng.random() < 0.3:
                sent.speculation.num_draft_tokens = rng.choice((0, 1, 2, 4))
            tally, alone, how = self.tally, asyncio.shield(self._alone[index]), rng.choice(HOWS)
            if how == "over HTTP" and can_ask_over_http(sent):
                answered = await ask_over_http(self.busy_http, sent)
                tally.compare_http(index, request, await alone, answered)
            elif how == "resumed" and _can_go_on(sent):
                got = await _resumed(self.busy, sent, rng.randint(1, sent.sampling.max_tokens))
                tally.compare(index, request, await alone, got, how=how)
            elif how == "unary":
                tally.compare(index, request, await alone, await _unary(self.busy, sent), how=how)
            else:
                got = await _streamed(self.busy, sent)
                tally.compare(index, request, await alone, got, how="streamed")
            compared.put_nowait(None)

    async def _cancel(self, index: int) -> None:
        """Begin longer answers and cancel each after a few messages, until cancelled."""
        rng = random.Random(f"cancels {self.seed}/{index}")
        for turn in itertools.count():
            wanted = self._request(self.count + turn)
            wanted.sampling.ClearField("n")
            wanted.sampling.max_tokens = 4 * self.most_tokens
            call = self.busy.GenerateStream(_as_stream(wanted), timeout=CALL_S)
            messages = rng.randint(0, 5)
            try:
                async for _ in call:
                    if not messages:
                        break
                    messages -= 1
            except grpc.aio.AioRpcError:
                pass  # refused like any other
            call.cancel()
            await asyncio.sleep(0.3 * rng.random())  # a pause between calls, for which there is nothing to wait


def _as_stream(request: pb.GenerateRequest) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest.FromString(request.SerializeToString())


async def _unary(stub: Any, request: pb.GenerateRequest) -> Got:
    try:
        return await stub.Generate(request, timeout=CALL_S)
    except grpc.aio.AioRpcError as error:
        return refusal(error)


async def _streamed(stub: Any, request: pb.GenerateRequest) -> Got:
    try:
        return joined([message async for message in stub.GenerateStream(_as_stream(request), timeout=CALL_S)])
    except grpc.aio.AioRpcError as error:
        return refusal(error)


def _can_go_on(request: pb.GenerateRequest) -> bool:
    """Whether what is left of an answer can be asked for and added to what there was of it.

    So it can of one answer, which does not repeat its prompt, and in which no call is cut in two.
    """
    sampling = request.sampling
    return sampling.n <= 1 and not sampling.echo and not request.chat.tools_json


async def _resumed(stub: Any, request: pb.GenerateRequest, num_tokens: int) -> Got:
    """Break a stream off once it has given so many tokens, and go on behind them."""
    call = stub.GenerateStream(_as_stream(request), timeout=CALL_S)
    messages: list[pb.GenerateStreamResponse] = []
    emitted: list[int] = []
    try:
        async for message in call:
            messages.append(message)
            emitted += message.delta.token_ids
            if len(emitted) >= num_tokens:
                break
        call.cancel()
        if messages[-1].HasField("final"):
            return joined(messages)
        rest = _as_stream(request)
        rest.emitted_token_ids.extend(emitted)
        rest.sampling.ClearField("prompt_logprobs")  # they came before the first token
        messages += [message async for message in stub.GenerateStream(rest, timeout=CALL_S)]
    except grpc.aio.AioRpcError as error:
        return refusal(error)
    return joined(messages)
