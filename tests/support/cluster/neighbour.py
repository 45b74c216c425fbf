"""A small well-behaved client beside a bad one: its first tokens must not wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from gemray.channel_options import client_options
from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc

FOUR_TOKENS = pb.SamplingParameters(max_tokens=4)
LONGEST_WAIT_S = 2.0
"""For a first token, on a loaded machine of two cores."""


@asynccontextmanager
async def neighbour(address: str, *, pause_s: float = 0.05) -> AsyncIterator[list[float]]:
    """Ask for 4 tokens again and again, on a connection of its own; gives the times to first tokens as they come.

    Leaving the block fails when one was longer than LONGEST_WAIT_S.
    """
    waits: list[float] = []
    # A channel of its own subchannel: equal options would share the bad client's connection.
    options = [*client_options(address), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def ask() -> None:
            while True:
                began = time.monotonic()
                events: list[pb.GenerateStreamResponse] = []
                async for event in stub.GenerateStream(pb.GenerateStreamRequest(text="Hi", sampling=FOUR_TOKENS)):
                    if not events:
                        waits.append(time.monotonic() - began)
                    events.append(event)
                assert events[-1].final.usage.completion_tokens > 0
                await asyncio.sleep(pause_s)

        asking = asyncio.create_task(ask())
        try:
            yield waits
            answered = len(waits)
            while len(waits) <= answered and not asking.done():  # the one that was asked beside the bad client, too
                await asyncio.sleep(0.01)
        finally:
            asking.cancel()
            await asyncio.wait([asking])
        if not asking.cancelled():
            asking.result()
        assert max(waits) < LONGEST_WAIT_S, f"first tokens took {sorted(waits)[-3:]} s"
