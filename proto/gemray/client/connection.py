"""The service's stub over one channel, for those who want the calls as gRPC has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from gemray.channel_options import DEFAULT_MAX_MESSAGE_BYTES, client_options
from gemray.client.errors import error_of
from gemray.client.server_address import ServerAddress
from gemray.v1 import generation_pb2_grpc

# grpc.health.v1.HealthCheckRequest without a service, and a response whose only field is SERVING: not worth the package
# that has them.
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
OF_ALL_SERVICES = b""
SERVING = b"\x08\x01"


def open_channel(server: ServerAddress, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> grpc.Channel:
    """A channel with the limits of both sides; raises InvalidOption."""
    credentials = server.credentials()
    options = client_options(server.address, max_message_bytes)
    if credentials is None:
        return grpc.insecure_channel(server.address, options=options)
    return grpc.secure_channel(server.address, credentials, options=options)


@contextmanager
def connected(server: ServerAddress) -> Iterator[Any]:
    """A GenerationService stub; gRPC errors inside the block become ClientErrors of one sentence."""
    with open_channel(server) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(_WithMetadata(channel, server))  # type: ignore[no-untyped-call]
        try:
            yield stub
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:
                raise KeyboardInterrupt from None
            raise error_of(server.address, error) from None


class _WithMetadata:
    """A channel whose calls carry the server's metadata."""

    def __init__(self, channel: grpc.Channel, server: ServerAddress) -> None:
        self._channel = channel
        self._server = server

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._bind(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._bind(self._channel.unary_stream(*args, **kwargs))

    def _bind(self, call: Any) -> Any:
        return lambda request, **kwargs: call(request, metadata=self._server.metadata, **kwargs)
