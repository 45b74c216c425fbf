"""The body of a request: bounded in size and time, and JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from gemray.openai.errors import ClientGone, HttpError
from gemray.openai.fields import Fields
from gemray.strict_json import JsonFault, read_strictly

T = TypeVar("T")

READ_S = 60.0
"""How long a client may take to send a body."""
MAX_INLINE_BYTES = 64 << 10
"""Larger bodies take more than a millisecond to read."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body; raises HttpError, and ClientGone."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # of a web page, a browser sends others without asking the server first
        raise HttpError(415, f"content-type = {kind!r} is not allowed: application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise HttpError(415, f"content-encoding = {coding!r} is not allowed: bodies as they are, not compressed")
    if int(request.headers.get("content-length", "0")) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(READ_S):
            return await _content(request, max_bytes)
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise HttpError(408, f"the body was not sent within {READ_S:g} s") from None


async def understood(content: bytes, read: Callable[[Fields], T]) -> T:
    """What `read` makes of a body's fields; raises HttpError. A large one is read beside the event loop."""

    def work() -> T:
        try:
            return read(Fields(parse(content)))
        except RecursionError:  # of what is written anew, as schemas are
            raise _too_deep() from None

    return work() if len(content) <= MAX_INLINE_BYTES else await asyncio.to_thread(work)


async def _content(request: Request, max_bytes: int) -> bytes:
    chunks, num_bytes = [], 0
    async for chunk in request.stream():
        chunks.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
    return b"".join(chunks)


def parse(content: bytes) -> object:
    """The JSON; raises HttpError."""
    try:
        return read_strictly(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the body is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise _too_deep() from None
    except JsonFault as fault:
        raise HttpError(400, f"the body {fault}") from None


def _too_deep() -> HttpError:
    return HttpError(400, "the body's JSON is nested too deep")


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"the body is larger than {max_bytes} bytes", code="too_large")
