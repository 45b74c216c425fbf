"""A small well-behaved client beside a bad one: it is answered, and the server's loop is never held for long."""

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
LONGEST_HOLD_S = 2.0
"""For the event loop without a break, in CPU time of its thread: a machine that others use makes it no longer."""
TICK_S = 0.005


@asynccontextmanager
async def neighbour(address: str, *, pause_s: float = 0.05) -> AsyncIterator[list[int]]:
    """Ask for 4 tokens again and again, on a connection of its own; gives the lengths of the answers as they come.

    Leaving the block fails when the event loop, which is the server's, too, was held for LONGEST_HOLD_S of CPU time:
    so long would a first token have waited on a machine that does nothing else.
    """
    answers: list[int] = []
    longest_hold_s = 0.0

    async def tick() -> None:
        nonlocal longest_hold_s
        while True:
            before = time.thread_time()
            await asyncio.sleep(TICK_S)
            longest_hold_s = max(longest_hold_s, time.thread_time() - before)

    # A channel of its own subchannel: equal options would share the bad client's connection.
    options = [*client_options(address), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def ask() -> None:
            while True:
                request = pb.GenerateStreamRequest(text="Hi", sampling=FOUR_TOKENS)
                events = [event async for event in stub.GenerateStream(request)]
                answers.append(events[-1].final.usage.completion_tokens)
                assert answers[-1] > 0
                await asyncio.sleep(pause_s)

        asking, ticking = asyncio.create_task(ask()), asyncio.create_task(tick())
        try:
            yield answers
            answered = len(answers)
            while len(answers) <= answered and not asking.done():  # the one that was asked beside the bad client, too
                await asyncio.sleep(0.01)
        finally:
            asking.cancel()
            ticking.cancel()
            await asyncio.wait([asking, ticking])
        if not asking.cancelled():
            asking.result()
        assert longest_hold_s < LONGEST_HOLD_S, f"the loop was held for {longest_hold_s:.2f} s of CPU time"
