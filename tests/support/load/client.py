"""The clients of a load: streams that are read, that are cancelled half-way, and that nobody reads."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from gemray.channel_options import client_options
from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc

STREAMS_OF_CHANNEL = 50
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
"""Options of a client that takes little before it reads: its streams block after a few messages."""
CANCELLED_SHARE = 0.2
REFUSED_PAUSE_S = 1.0
"""What RetryInfo asks for: a refused client's place is not taken by the next one at once, who would be refused, too."""
PROMPTS = ("The manual of the printer says", "Write a Python function that", "import this", "A list comprehension is")
END_OF_STREAM: Any = vars(grpc.aio)["EOF"]
"""Not in the stubs."""


@dataclass(frozen=True)
class Plan:
    """How much is asked for."""

    requests: int
    streams: int
    """At one time."""
    unread: int
    """Those among the requests whose client reads one message, and no other until all other streams have ended."""
    seed: int = 0


@dataclass
class Outcome:
    """What became of the requests, as their clients saw it."""

    by_status: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    most_at_once: int = 0
    unexpected: list[str] = field(default_factory=list)
    """Statuses that no request of this load should end with."""

    @property
    def count(self) -> int:
        """Requests that have ended."""
        return self.by_status.total()


EXPECTED = {"OK", "CANCELLED", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
"""DEADLINE_EXCEEDED: a stream that was not read for as long as the server waits."""


async def run_load(address: str, plan: Plan) -> Outcome:
    """Send all requests, `plan.streams` at one time, and wait for their ends."""
    outcome = Outcome()
    num_channels = max(1, plan.streams // STREAMS_OF_CHANNEL)
    options = (*client_options(address), ("grpc.use_local_subchannel_pool", 1))  # connections of their own
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(num_channels)]
    channels.append(grpc.aio.insecure_channel(address, options=(*options, *SMALL_WINDOW)))
    stubs: list[Any] = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
    all_read = asyncio.Event()
    places = asyncio.Semaphore(plan.streams)
    live = 0

    async def one(index: int) -> None:
        nonlocal live
        async with places:
            live += 1
            outcome.most_at_once = max(outcome.most_at_once, live)
            status = await _read(stubs[index % num_channels], Random(f"{plan.seed}:{index}"), outcome)
            if status == "RESOURCE_EXHAUSTED":
                await asyncio.sleep(REFUSED_PAUSE_S)
            live -= 1

    unread = [asyncio.create_task(_leave_unread(stubs[-1], seed, all_read, outcome)) for seed in range(plan.unread)]
    await asyncio.gather(*(one(index) for index in range(plan.requests - plan.unread)))
    all_read.set()
    await asyncio.gather(*unread)
    for channel in channels:
        await channel.close(None)
    return outcome


async def _read(stub: Any, random: Random, outcome: Outcome) -> str:
    request = pb.GenerateStreamRequest(
        text=random.choice(PROMPTS),
        sampling=pb.SamplingParameters(seed=random.getrandbits(64), max_tokens=random.randint(2, 24), ignore_eos=True),
    )
    call = stub.GenerateStream(request)
    is_cancelled = random.random() < CANCELLED_SHARE
    if is_cancelled and random.random() < 0.3:  # before it is taken, while it waits, or while it runs
        asyncio.get_running_loop().call_later(random.random(), call.cancel)
    most_messages = random.randint(1, 8) if is_cancelled else None
    return await _until_the_end(call, outcome, most_messages)


async def _leave_unread(stub: Any, seed: int, all_read: asyncio.Event, outcome: Outcome) -> None:
    """A stream larger than a connection's window, of which one message is read in time."""
    sampling = pb.SamplingParameters(seed=seed, max_tokens=300, ignore_eos=True, logprobs=20)
    call = stub.GenerateStream(pb.GenerateStreamRequest(text=PROMPTS[0], sampling=sampling))
    with suppress(grpc.aio.AioRpcError):  # told below
        await call.read()
    await all_read.wait()
    await _until_the_end(call, outcome, None)


async def _until_the_end(call: Any, outcome: Outcome, most_messages: int | None) -> str:
    """Read on, and count the status; `most_messages` is where to cancel."""
    num_messages = 0
    try:
        while (message := await call.read()) is not END_OF_STREAM:
            outcome.tokens += len(message.delta.token_ids)
            num_messages += 1
            if num_messages == most_messages:
                call.cancel()
        status = (await call.code()).name
    except grpc.aio.AioRpcError as error:
        status = error.code().name
    except asyncio.CancelledError:  # how a cancelled call tells its reader
        status = "CANCELLED"
    outcome.by_status[status] += 1
    if status not in EXPECTED:
        outcome.unexpected.append(f"{status}: {await call.details()}")
    return status
