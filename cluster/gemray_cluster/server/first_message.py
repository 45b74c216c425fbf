"""Calls whose one request message never comes get an answer.

gRPC for Python drops a unary call that ends before its message without any status: a client without a deadline waits
for ever. So every call is taken as a stream of requests, of which the first is read here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from gemray_cluster.server.status import Context, errors_as_statuses
from gemray_workers.errors import InvalidField, Summary

FIRST_MESSAGE_DEADLINE_S = 60.0
"""For a request to arrive whole: 16 MiB over a line of 3 Mbit/s."""


class FirstMessage(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends calls without a request with INVALID_ARGUMENT. Put it first: the others see unary requests as ever."""

    def __init__(self, deadline_s: float = FIRST_MESSAGE_DEADLINE_S) -> None:
        """`deadline_s` is how long a call may stay without its message."""
        self._deadline_s = deadline_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The same handler over a stream of requests; one that takes a stream stays as it is."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler  # type: ignore[no-any-return]
        make, behaviour = (
            (grpc.stream_stream_rpc_method_handler, self._streaming(handler.unary_stream))
            if handler.response_streaming
            else (grpc.stream_unary_rpc_method_handler, self._unary(handler.unary_unary))
        )
        return make(
            behaviour,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _unary(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(requests: AsyncIterator[Any], context: Context) -> Any:
            return await behaviour(await self._first(requests, context), context)

        return answer

    def _streaming(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(requests: AsyncIterator[Any], context: Context) -> None:
            responses = behaviour(await self._first(requests, context), context)
            # A handler either is an async generator or writes to its context.
            if isinstance(responses, AsyncGenerator):
                async with aclosing(responses):
                    async for response in responses:
                        await context.write(response)
            else:
                await responses

        return answer

    async def _first(self, requests: AsyncIterator[Any], context: Context) -> Any:
        async with errors_as_statuses(context):
            try:
                async with asyncio.timeout(self._deadline_s):
                    return await anext(requests)
            except StopAsyncIteration:
                raise InvalidField("request", Summary("none"), "one message before the call's end") from None
            except TimeoutError:
                raise InvalidField(
                    "request", Summary("none"), f"one message within {self._deadline_s:g} s of the call's beginning"
                ) from None
