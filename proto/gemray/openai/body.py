"""The body of a request: bounded in size and time, and JSON."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request

from gemray.openai.errors import ClientGone, HttpError, shown
from gemray.openai.fields import Fields

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
        return json.loads(
            content.decode("utf-8"), parse_constant=_refuse_constant, parse_int=_integer, object_pairs_hook=_object
        )
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the body is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # JSONDecodeError too
        raise HttpError(400, f"the body is not JSON: {error}") from None


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:  # Python reads so many digits of none
        raise HttpError(400, f"the body has an integer of {len(digits)} digits, which no field takes") from None


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(members)
    if len(read) < len(members):  # readers of JSON differ in which one counts
        twice = next(name for name, count in Counter(name for name, _ in members).items() if count > 1)
        raise HttpError(400, f"the body names {shown(twice)} more than once in one object")
    return read


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _too_deep() -> HttpError:
    return HttpError(400, "the body's JSON is nested too deep")


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"the body is larger than {max_bytes} bytes", code="too_large")
