"""Clients that stream again and again with the client's own retry, so that at any time as many streams are live."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from gemray.client import AsyncClient, Retry
from gemray.client.errors import ClientError
from gemray.v1 import generation_pb2 as pb

PATIENT = Retry(first_s=900, resume_s=900, max_delay_s=1.0)


class Streams:
    """Asks each request over and over, and holds each answer against what it must be."""

    def __init__(
        self, address: str, asked: Sequence[pb.GenerateStreamRequest], expected: Mapping[str, list[int]]
    ) -> None:
        """Begin them all."""
        self._client = AsyncClient(address, retry=PATIENT)
        self.asked = asked
        self._expected = expected
        self._ending = False
        self.num_whole = 0
        """Answers that ended and were right."""
        self.wrong: list[str] = []
        """Answers that were lost or changed, in words."""
        self.lengths: dict[str, int] = {}
        """Tokens of the streams that are live."""
        self.newest = dict.fromkeys((request.request_id for request in asked), time.monotonic())
        """When each stream got its newest message, or was asked."""
        self._longest_pause = 0.0
        self._tasks = [asyncio.create_task(self._ask_again(request)) for request in asked]

    @property
    def num_begun(self) -> int:
        """Streams that have given a token and not ended."""
        return sum(map(bool, self.lengths.values()))

    def take_longest_pause(self) -> float:
        """Seconds of the longest wait between two messages of a stream since this was last asked."""
        longest, self._longest_pause = self._longest_pause, 0.0
        return longest

    async def end(self, deadline_s: float) -> None:
        """Let the live streams end, and ask no more."""
        self._ending = True
        try:
            await asyncio.wait_for(asyncio.gather(*self._tasks), deadline_s)
        finally:
            await self.cancel()

    async def cancel(self) -> None:
        """Leave at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    async def _ask_again(self, request: pb.GenerateStreamRequest) -> None:
        while not self._ending:
            await self._ask(request)

    async def _ask(self, request: pb.GenerateStreamRequest) -> None:
        name = request.request_id
        ids: list[int] = []
        self.lengths[name] = 0
        self.newest[name] = time.monotonic()
        try:
            async for message in self._client.stream(request):
                now = time.monotonic()
                self._longest_pause = max(self._longest_pause, now - self.newest[name])
                self.newest[name] = now
                ids += message.delta.token_ids
                self.lengths[name] = len(ids)
        except ClientError as error:
            self.wrong.append(f"{name} was lost behind {len(ids)} tokens: {error}")
            await asyncio.sleep(0.5)
        else:
            if ids == self._expected[name]:
                self.num_whole += 1
            else:
                self.wrong.append(f"{name} was changed: {ids} instead of {self._expected[name]}")
        finally:
            del self.lengths[name]
