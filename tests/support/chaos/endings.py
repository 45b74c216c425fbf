"""Requests that end in every way that clients have: read to the end, cancelled, timed out, their connection cut."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

from gemray.client import AsyncClient, Retry
from gemray.client.errors import ClientError
from gemray.v1 import generation_pb2 as pb
from support.chaos.relay import Relay

NO_RETRY = Retry(first_s=0, resume_s=0)
AT_ONCE = 20
"""Requests that run at the same time."""
WAYS = ("read", "one message", "cancelled", "deadline", "cut")


class Endings:
    """Asks requests and ends each in a way of its own."""

    def __init__(self, address: str, asked: Sequence[pb.GenerateStreamRequest], seed: int = 0) -> None:
        """To be used once, in the loop that runs."""
        self._address = address
        self._asked = asked
        self._random = random.Random(seed)
        self.ended: Counter[str] = Counter()
        """How many ended in each way."""
        self.unexpected: list[str] = []
        """Errors of requests that were to be read to their end."""

    async def run(self, count: int) -> None:
        """Ask `count` requests."""
        todo = list(range(count))
        async with AsyncClient(self._address, retry=NO_RETRY) as client:
            await asyncio.gather(*(self._work(client, todo) for _ in range(AT_ONCE)))

    async def _work(self, client: AsyncClient, todo: list[int]) -> None:
        while todo:
            index = todo.pop()
            way = self._random.choice(WAYS)
            try:
                await self._end(way, client, self._asked[index % len(self._asked)], self._random.randrange(8))
            except ClientError as error:
                if way in ("read", "one message"):
                    self.unexpected.append(str(error))
            self.ended[way] += 1

    async def _end(self, way: str, client: AsyncClient, request: pb.GenerateStreamRequest, messages: int) -> None:
        match way:
            case "read":
                async for _ in client.stream(request):
                    pass
            case "one message":
                await client.generate(pb.GenerateRequest(token_ids=request.token_ids, sampling=request.sampling))
            case "cancelled":
                await _read_some(client, request, messages)
            case "deadline":
                async for _ in client.stream(request, timeout_s=0.02 + 0.02 * messages):
                    pass
            case "cut":
                async with Relay(self._address) as relay, AsyncClient(relay.address, retry=NO_RETRY) as dying:
                    reading = asyncio.create_task(_read_some(dying, request, messages + 1))
                    await asyncio.wait([reading], timeout=0.05 * (1 + messages))
                    relay.cut()
                    await asyncio.wait([reading])
                    reading.exception()


async def _read_some(client: AsyncClient, request: pb.GenerateStreamRequest, messages: int) -> None:
    """Read so many messages, then leave."""
    async with client.stream(request) as answer:
        for _ in range(messages):
            await anext(answer, None)
