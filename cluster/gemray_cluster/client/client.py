"""A client of a gemray server: a channel with the limits of both sides, and errors as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from gemray.v1 import generation_pb2_grpc
from gemray_cluster.client.errors import RequestFailed, RequestRefused, ServerUnreachable
from gemray_cluster.server.channel_options import client_options
from gemray_cluster.server.tls_files import read_authority, read_key_pair
from gemray_workers.errors import GemrayError, InvalidField

MAX_PORT = 65535

_ERRORS: Mapping[grpc.StatusCode, type[GemrayError]] = {
    grpc.StatusCode.UNAVAILABLE: ServerUnreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: ServerUnreachable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ServerUnreachable,
    grpc.StatusCode.INVALID_ARGUMENT: RequestRefused,
    grpc.StatusCode.UNAUTHENTICATED: RequestRefused,
    grpc.StatusCode.UNIMPLEMENTED: RequestRefused,
}


@dataclass(frozen=True)
class ServerAddress:
    """A server and how to be let in."""

    address: str
    """host:port."""
    auth_token_file: str | None = None
    """The first line is sent as a bearer token."""
    tls_ca_file: str | None = None
    """Authority of the server's certificate; None talks plain text."""
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    """The client's own certificate and key (mTLS)."""

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= MAX_PORT:  # gRPC would take it modulo 65536
            raise InvalidField("address", self.address, f"HOST:PORT, with a port of 1 to {MAX_PORT}")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For each call."""
        if self.auth_token_file is None:
            return ()
        lines = _read("auth_token_file", self.auth_token_file).decode().split()
        return (("authorization", f"Bearer {lines[0] if lines else ''}"),)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """For the channel; None for plain text."""
        if self.tls_ca_file is None:
            return None
        key, chain = self._key_pair()
        return grpc.ssl_channel_credentials(
            root_certificates=read_authority("tls_ca_file", self.tls_ca_file), private_key=key, certificate_chain=chain
        )

    def _key_pair(self) -> tuple[bytes, bytes] | tuple[None, None]:
        if self.tls_key_file is None and self.tls_cert_file is None:
            return None, None
        if self.tls_key_file is None or self.tls_cert_file is None:
            raise InvalidField("tls_key_file", self.tls_key_file, "set together with tls_cert_file, or both unset")
        return read_key_pair(self.tls_key_file, self.tls_cert_file)


@contextmanager
def connected(server: ServerAddress) -> Iterator[Any]:
    """A GenerationService stub; gRPC errors inside the block become GemrayErrors of one sentence."""
    credentials = server.credentials()
    options = client_options(server.address)
    channel = (
        grpc.secure_channel(server.address, credentials, options=options)
        if credentials
        else grpc.insecure_channel(server.address, options=options)
    )
    with channel, _sentences(server.address):
        yield generation_pb2_grpc.GenerationServiceStub(_WithMetadata(channel, server.metadata))  # type: ignore[no-untyped-call]


@contextmanager
def _sentences(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.CANCELLED:
            raise KeyboardInterrupt from None
        kind = _ERRORS.get(code, RequestFailed)
        raise kind(f"{address}: {code.name}: {details}") from None


class _WithMetadata:
    """A channel whose calls carry metadata."""

    def __init__(self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        self._channel = channel
        self._metadata = tuple(metadata)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._bind(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._bind(self._channel.unary_stream(*args, **kwargs))

    def _bind(self, call: Any) -> Any:
        return lambda request, **kwargs: call(request, metadata=self._metadata, **kwargs)


def _read(field: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidField(field, path, f"a readable file ({error.strerror})") from error
