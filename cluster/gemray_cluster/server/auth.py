"""Bearer-token authentication of every call except health checks, which probes make without credentials."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from gemray.client import token_file
from gemray.client.errors import InvalidOption
from gemray_cluster.server.watched_files import WatchedFiles
from gemray_workers.errors import InvalidField

HEALTH_PREFIX = "/grpc.health.v1.Health/"


def read_tokens(path: str | Path) -> tuple[str, ...]:
    """One accepted token a line, so that tokens can be rotated; raises InvalidField."""
    try:
        return token_file.read_tokens(path)
    except InvalidOption as error:
        raise InvalidField(error.field, error.value, error.allowed) from error


class BearerAuth(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends calls without a known ``authorization: Bearer TOKEN`` with UNAUTHENTICATED."""

    def __init__(self, tokens: Callable[[], Sequence[str]]) -> None:
        """`tokens` gives those that are accepted now."""
        self._tokens = tokens

    @classmethod
    def of_file(cls, path: str) -> BearerAuth:
        """Accept the tokens that a file holds when a call comes; raises InvalidField for one that holds none now."""
        return cls(WatchedFiles([path], lambda: read_tokens(path)).latest)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Let the call pass, or put a refusal of the same kind in its place."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH_PREFIX):
            return handler
        if self._is_known(handler_call_details):
            return handler
        return _refusal_like(handler)

    def _is_known(self, details: grpc.HandlerCallDetails) -> bool:
        for key, value in details.invocation_metadata or ():
            if key == "authorization" and isinstance(value, str):
                scheme, _, token = value.partition(" ")
                given = token.strip().encode()
                known = [accepted.encode() for accepted in self._tokens()]
                # Every token is compared, and in constant time: timing tells nothing.
                return scheme.lower() == "bearer" and sum(hmac.compare_digest(given, t) for t in known) > 0
        return False


async def _refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this server asks for 'authorization: Bearer TOKEN'")


def _refusal_like(handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(_refuse, response_serializer=handler.response_serializer)  # the request stays unread bytes
