"""Settings of the gRPC server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gemray.channel_options import DEFAULT_MAX_MESSAGE_BYTES
from gemray_workers.errors import InvalidField
from gemray_workers.ranges import AT_LEAST_ONE, DURATION, Range, check_ranges, ranged

LogFormat = Literal["text", "json"]

PORT = Range(0, 65535)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the server listens and what it accepts."""

    served_model_name: str | None = None
    """What clients call the model; None for the checkpoint's own name."""
    host: str = "127.0.0.1"
    port: int = ranged(PORT, 50051)
    """0 takes a free one."""
    metrics_port: int | None = ranged(PORT, None)
    """Where Prometheus finds /metrics; None for nowhere."""
    log_format: LogFormat = "text"
    """Lines on stderr: ``text`` for people, or a ``json`` object each."""
    otlp_traces_endpoint: str | None = None
    """``http://HOST:PORT`` (or https) of a collector of OpenTelemetry traces; None sends none."""
    max_live_requests: int = ranged(AT_LEAST_ONE, 256)
    """Running and queued together; one more is answered with RESOURCE_EXHAUSTED."""
    max_message_bytes: int = ranged(Range(1 << 16, unit="bytes"), DEFAULT_MAX_MESSAGE_BYTES)
    drain_deadline_s: float = ranged(Range(0, unit="seconds"), 30.0)
    """How long live requests may go on once the server is told to end."""
    drain_notice_s: float = ranged(Range(0, unit="seconds"), 1.0)
    """How long health says NOT_SERVING before connections are told to go away (GOAWAY): clients that watch it leave by
    themselves meanwhile."""
    max_connection_age_s: float | None = ranged(DURATION, None)
    """Age at which a connection is told to go away, so that clients spread anew; its streams go on. None: never."""
    write_deadline_s: float = ranged(DURATION, 30.0)
    """How long a client may read nothing of its stream before that ends."""
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_client_ca_file: str | None = None
    """Clients must show a certificate that this authority signed (mTLS)."""
    auth_token_file: str | None = None
    """Clients must send one of these bearer tokens, one a line."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.log_format not in get_args(LogFormat):
            raise InvalidField("log_format", self.log_format, "text or json")
        if self.metrics_port == self.port != 0:
            raise InvalidField("metrics_port", self.metrics_port, f"another port than gRPC's, {self.port}")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise InvalidField("tls_key_file", self.tls_key_file, "set together with tls_cert_file, or both unset")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise InvalidField("tls_client_ca_file", self.tls_client_ca_file, "unset without tls_cert_file")
