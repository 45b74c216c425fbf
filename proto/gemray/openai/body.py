"""The body of a request: bounded in size and time, and JSON."""

from __future__ import annotations

import asyncio
import json
from typing import NoReturn

from starlette.requests import ClientDisconnect, Request

from gemray.openai.errors import ClientGone, HttpError
from gemray.openai.fields import Fields

READ_S = 60.0
"""How long a client may take to send a body."""


async def read_body(request: Request, max_bytes: int) -> Fields:
    """The body's fields; raises HttpError, and ClientGone."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # of a web page, a browser sends others without asking the server first
        raise HttpError(415, f"content-type = {kind!r} is not allowed: application/json")
    if int(request.headers.get("content-length", "0")) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(READ_S):
            content = await _content(request, max_bytes)
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise HttpError(408, f"the body was not sent within {READ_S:g} s") from None
    return Fields(parse(content))


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
        return json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the body is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise HttpError(400, "the body's JSON is nested too deep") from None
    except ValueError as error:  # JSONDecodeError too
        raise HttpError(400, f"the body is not JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"the body is larger than {max_bytes} bytes", code="too_large")
