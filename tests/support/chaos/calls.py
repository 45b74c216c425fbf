"""Callers that make one call after the other without a retry, and note how each ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import grpc

from gemray.client import AsyncClient, Retry
from gemray.client.errors import ClientError
from gemray.v1 import generation_pb2 as pb

WHOLE, REFUSED, CUT_BY_DRAIN, CUT = "whole", "refused before it began", "cut by the drain's deadline", "cut"
_PAUSE_S = 0.05


class Callers:
    """Each has a connection of its own, as clients have."""

    def __init__(self, address: str, asked: Sequence[pb.GenerateStreamRequest]) -> None:
        """Begin."""
        self._address = address
        self._ending = False
        self.num_begun = 0
        """Calls that have got a message and have not ended."""
        self.ended: Counter[str] = Counter()
        """How calls ended."""
        self.cut: list[str] = []
        """Those that ended in another way than whole, refused, or with what a drain says at its deadline."""
        self._tasks = [asyncio.create_task(self._call_again(request)) for request in asked]

    async def end(self, deadline_s: float) -> None:
        """Let what runs end, and call no more."""
        self._ending = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), deadline_s)

    async def cancel(self) -> None:
        """Leave at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _call_again(self, request: pb.GenerateStreamRequest) -> None:
        async with AsyncClient(self._address, retry=Retry(first_s=0, resume_s=0)) as client:
            while not self._ending:
                self.ended[await self._call(client, request)] += 1

    async def _call(self, client: AsyncClient, request: pb.GenerateStreamRequest) -> str:
        num_messages = 0
        try:
            async for _ in client.stream(request):
                num_messages += 1
                self.num_begun += num_messages == 1
        except ClientError as error:
            if error.code is grpc.StatusCode.UNAVAILABLE and "had not within drain_deadline_s" in str(error):
                return CUT_BY_DRAIN
            if num_messages == 0 and error.code is grpc.StatusCode.UNAVAILABLE:
                await asyncio.sleep(_PAUSE_S)
                return REFUSED
            self.cut.append(f"{request.request_id} behind {num_messages} messages: {error}")
            return CUT
        finally:
            self.num_begun -= num_messages > 0
        return WHOLE
