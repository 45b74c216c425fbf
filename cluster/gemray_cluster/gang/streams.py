"""The open requests of a gang: each step's message is taken apart into one queue a request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from gemray_cluster.gang.client import GangUnavailable
from gemray_workers.messages import SequenceDelta


class Stream:
    """One request's deltas, in order."""

    def __init__(self, request_id: str, wire_id: str) -> None:
        self.request_id = request_id
        self.wire_id = wire_id
        """The request's id inside the gang, never used twice: late deltas of a cancelled request then find no queue."""
        self._arrived: asyncio.Queue[SequenceDelta | GangUnavailable] = asyncio.Queue()

    def put(self, item: SequenceDelta | GangUnavailable) -> None:
        """Add a delta under the client's request id, or the error that ends the stream."""
        if isinstance(item, SequenceDelta):
            item = msgspec.structs.replace(item, request_id=self.request_id)
        self._arrived.put_nowait(item)

    async def next(self) -> SequenceDelta:
        """The next delta. Raises GangUnavailable when the gang has ended."""
        item = await self._arrived.get()
        if isinstance(item, GangUnavailable):
            raise item
        return item


class StreamTable:
    """The open streams of a gang, by wire id."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._opened = 0

    def __len__(self) -> int:
        """How many requests are open."""
        return len(self._streams)

    def open(self, request_id: str) -> Stream:
        """A stream for a new request."""
        stream = Stream(request_id, f"{self._opened}:{request_id}")
        self._opened += 1
        self._streams[stream.wire_id] = stream
        return stream

    def close(self, stream: Stream) -> None:
        """Forget a stream; its late deltas are dropped."""
        self._streams.pop(stream.wire_id, None)

    def deliver(self, deltas: Iterable[SequenceDelta]) -> None:
        """Give each delta to its request; those of requests that are gone are dropped."""
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.put(delta)

    def fail_all(self, reason: str) -> None:
        """End every open stream with `GangUnavailable`."""
        for stream in self._streams.values():
            stream.put(GangUnavailable(reason))
