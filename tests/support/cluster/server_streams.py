"""Streams of a server that a test ends, kills or robs of its ranks."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc

NUM_TOKENS = 100


class Reader:
    """A client that reads one stream to its end."""

    def __init__(self, channel: grpc.aio.Channel, seed: int, num_tokens: int = NUM_TOKENS) -> None:
        self.ids: list[int] = []
        self.final: pb.Completion | None = None
        self.began = asyncio.Event()
        sampling = pb.SamplingParameters(seed=seed, max_tokens=num_tokens, ignore_eos=True)
        self.task = asyncio.create_task(
            self._read(channel, pb.GenerateStreamRequest(text="import this", sampling=sampling))
        )

    async def _read(self, channel: grpc.aio.Channel, request: pb.GenerateStreamRequest) -> None:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        async for message in stub.GenerateStream(request):
            self.began.set()
            if message.HasField("delta"):
                self.ids += message.delta.token_ids
            else:
                self.final = message.final

    async def read_on(self) -> list[int]:
        """Everything that it got, to the end of the stream."""
        await self.task
        assert self.final is not None
        assert self.final.usage.completion_tokens == len(self.ids) == NUM_TOKENS
        return self.ids


async def reading(channel: grpc.aio.Channel, count: int) -> list[Reader]:
    """Streams that have begun."""
    readers = [Reader(channel, seed) for seed in range(count)]
    await asyncio.gather(*(reader.began.wait() for reader in readers))
    return readers
