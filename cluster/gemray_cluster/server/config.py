"""Settings of the gRPC server."""

from __future__ import annotations

from dataclasses import dataclass

from gemray_cluster.server.channel_options import DEFAULT_MAX_MESSAGE_BYTES
from gemray_workers.errors import InvalidField


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the server listens and what it accepts."""

    host: str = "127.0.0.1"
    port: int = 50051
    """0 takes a free one."""
    max_live_requests: int = 256
    """Running and queued together; one more is answered with RESOURCE_EXHAUSTED."""
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    drain_deadline_s: float = 30.0
    """How long live requests may go on once the server is told to end."""
    write_deadline_s: float = 30.0
    """How long a client may read nothing of its stream before that ends."""
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_client_ca_file: str | None = None
    """Clients must show a certificate that this authority signed (mTLS)."""
    auth_token_file: str | None = None
    """Clients must send one of these bearer tokens, one a line."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidField("port", self.port, "an integer 0..65535")
        if self.max_live_requests < 1:
            raise InvalidField("max_live_requests", self.max_live_requests, "an integer >= 1")
        if self.max_message_bytes < 1 << 16:
            raise InvalidField("max_message_bytes", self.max_message_bytes, "at least 64KiB")
        if not self.drain_deadline_s >= 0:
            raise InvalidField("drain_deadline_s", self.drain_deadline_s, "seconds >= 0")
        if not self.write_deadline_s > 0:
            raise InvalidField("write_deadline_s", self.write_deadline_s, "seconds > 0")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise InvalidField("tls_key_file", self.tls_key_file, "set together with tls_cert_file, or both unset")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise InvalidField("tls_client_ca_file", self.tls_client_ca_file, "unset without tls_cert_file")
