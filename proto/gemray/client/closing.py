"""Calls of a client that was closed."""

from __future__ import annotations

from typing import Any

import grpc

from gemray.client.errors import ClientClosed


class ClosingChannel:
    """A channel whose calls raise ClientClosed once it is closed, where gRPC raises errors of its own."""

    def __init__(self, channel: Any, address: str) -> None:
        """`channel` is of grpc or grpc.aio."""
        self._channel = channel
        self._address = address
        self._is_closed = False

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As grpc.Channel.unary_unary."""
        return self._bind(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As grpc.Channel.unary_stream."""
        return self._bind(self._channel.unary_stream(*args, **kwargs))

    def close(self, *grace: float | None) -> Any:
        """As the channel's own; grpc.aio's is to be awaited."""
        self._is_closed = True
        return self._channel.close(*grace)

    def _bind(self, call: Any) -> Any:
        def invoke(request: Any, **kwargs: Any) -> Any:
            if self._is_closed:
                raise self._closed()
            try:
                return call(request, **kwargs)
            except (ValueError, grpc.aio.UsageError):  # another thread may have closed it meanwhile
                if self._is_closed:
                    raise self._closed() from None
                raise

        return invoke

    def _closed(self) -> ClientClosed:
        return ClientClosed(f"{self._address}: the client is closed")
