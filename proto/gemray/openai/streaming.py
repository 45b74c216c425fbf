"""Server-sent events: written as fast as the client reads, ended when it goes, alive while nothing comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from gemray.openai.errors import ClientGone

T = TypeVar("T")

HEARTBEAT_S = 15.0
"""Time without an event after which a comment is sent, so that nobody on the way takes the connection for dead."""
HEARTBEAT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
WRITE_S = 30.0
"""How long a client may read nothing of its stream before that ends."""


def event_of(body: Mapping[str, Any]) -> bytes:
    """An event with a JSON object."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def with_pauses(messages: AsyncIterator[T]) -> AsyncGenerator[T | None, None]:
    """The messages, and None each time that none has come for `HEARTBEAT_S`."""
    pending: asyncio.Future[T] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(anext(messages))
            await asyncio.wait({pending}, timeout=HEARTBEAT_S)
            if not pending.done():
                yield None
                continue
            arrived, pending = pending, None
            try:
                message = arrived.result()
            except StopAsyncIteration:
                return
            yield message
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.wait({pending})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; it is cancelled, and ClientGone raised, when the client closes its connection first.

    The request's body must have been read.
    """
    tasks = working, _ = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An answer of events, as an ASGI application."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], source: AsyncGenerator[Any, None], headers: Mapping[str, str]
    ) -> None:
        """`source` is closed with the events that are made of it, which may never begin."""
        self._events, self._source = events, source
        # The proxy nginx would else keep events until it has a buffer full of them.
        told = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **headers,
        }
        self._headers = [(name.encode(), value.encode()) for name, value in told.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; a client that goes, or stops reading, ends them."""
        async with aclosing(self._source), aclosing(self._events):
            with suppress(ClientGone):
                await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        async for event in self._events:
            await _in_time(send, event, more=True)
        await _in_time(send, b"", more=False)


async def _in_time(send: Send, content: bytes, *, more: bool) -> None:
    """Send a part; raises ClientGone when the client has stopped reading."""
    try:
        async with asyncio.timeout(WRITE_S):
            await send({"type": "http.response.body", "body": content, "more_body": more})
    except TimeoutError:
        raise ClientGone from None
