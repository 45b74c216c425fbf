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

from gemray.v1 import generation_pb2 as pb
from gemray.v1.generation_pb2_grpc import GenerationServiceStub
from support.equal_answers.comparison import Got, Tally, joined, refusal
from support.equal_answers.drawn import drawn_request

CALL_S = 3600.0
"""Longer than any answer takes on a machine that is not stuck."""
MOST_MESSAGE_BYTES = 1 << 26


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
            streamed = rng.random() < 0.5
            got = await (_streamed if streamed else _unary)(self.busy, sent)
            self.tally.compare(index, request, await asyncio.shield(self._alone[index]), got, streamed=streamed)
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
