"""The endpoints that generate: a body in, one answer or a stream of events out."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from gemray.client.retry import CHECKPOINT_METADATA
from gemray.openai.body import read_body, understood
from gemray.openai.chat_answers import ChatChunks, whole_chat
from gemray.openai.chat_request import Asked, read_chat_request
from gemray.openai.chunks import Chunks
from gemray.openai.completion_answers import CompletionChunks, whole_completion
from gemray.openai.completion_request import read_completion_request
from gemray.openai.errors import HttpError
from gemray.openai.fields import Fields
from gemray.openai.gateway import Caller, Gateway
from gemray.openai.head import Head
from gemray.openai.models import ServedModel
from gemray.openai.streaming import DONE, HEARTBEAT, EventStream, event_of, unless_gone
from gemray.v1 import generation_pb2 as pb

REQUEST_ID = "x-request-id"
"""The header, of a request and of its answer."""

Messages = AsyncGenerator[pb.GenerateStreamResponse | None, None]


@dataclass(frozen=True)
class Endpoint:
    """How one endpoint reads a body and writes an answer."""

    prefix: str
    """What the answers' ids begin with."""
    read: Callable[[Fields], Asked]
    whole: Callable[[Head, pb.GenerateResponse], dict[str, Any]]
    chunks: type[Chunks]

    async def answer(self, request: Request, gateway: Gateway, served: ServedModel) -> ASGIApp:
        """The answer to a request; raises HttpError, and ClientGone."""
        caller = gateway.caller(request.headers.get("authorization"))
        asked = await understood(await read_body(request, gateway.settings.max_bytes), self.read)
        answer_id = self.prefix + uuid.uuid4().hex
        request_id = asked.request.request_id = request.headers.get(REQUEST_ID) or answer_id
        if (expected := request.headers.get(CHECKPOINT_METADATA)) is not None:
            asked.request.checkpoint_hash = expected
        return await unless_gone(
            request.receive, self._answer(asked, answer_id, {REQUEST_ID: request_id}, caller, gateway, served)
        )

    async def _answer(
        self,
        asked: Asked,
        answer_id: str,
        headers: dict[str, str],
        caller: Caller,
        gateway: Gateway,
        served: ServedModel,
    ) -> ASGIApp:
        model = await served.check(asked.model, caller)
        head = Head(answer_id, int(time.time()), model.name, model.fingerprint)
        if not asked.streams:
            return JSONResponse(self.whole(head, await gateway.generate(asked.request, caller)), headers=headers)
        chunks = self.chunks(head, tells_usage=asked.tells_usage, num_answers=max(1, asked.request.sampling.n))
        messages = gateway.stream(asked.request, caller)
        try:
            # What is wrong with the request shows before its first token, when HTTP's status can still tell it.
            first = await anext(messages)
        except BaseException:
            await messages.aclose()
            raise
        return EventStream(_events(chunks, first, messages), messages, headers)


async def _events(
    chunks: Chunks, first: pb.GenerateStreamResponse | None, rest: Messages
) -> AsyncGenerator[bytes, None]:
    """The events of an answer. A stream that fails ends with an event that tells why, and without [DONE]."""
    message, is_over = first, False
    for chunk in chunks.begin():
        yield event_of(chunk)
    while not is_over:
        for chunk in chunks.of(message) if message is not None else ():
            yield event_of(chunk)
        if message is None:
            yield HEARTBEAT
        try:
            message = await anext(rest)
        except StopAsyncIteration:
            is_over = True
        except HttpError as error:
            yield event_of(error.body)
            return
    yield DONE


CHAT = Endpoint("chatcmpl-", read_chat_request, whole_chat, ChatChunks)
COMPLETIONS = Endpoint("cmpl-", read_completion_request, whole_completion, CompletionChunks)
