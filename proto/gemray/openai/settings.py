"""What a gateway is told."""

from __future__ import annotations

from dataclasses import dataclass

from gemray.channel_options import DEFAULT_MAX_MESSAGE_BYTES
from gemray.client import InvalidOption, Retry, ServerAddress
from gemray.client.sync import checked_timeout

MAX_PORT = 65535


@dataclass(frozen=True)
class GatewaySettings:
    """The server behind a gateway, and its patience and limits; raises InvalidOption."""

    server: ServerAddress
    """Without a token: callers show their own, which is handed on."""
    retry: Retry
    timeout_s: float | None = None
    """Most time of one answer; None for as long as its client waits."""
    max_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    """Largest body of a request, and largest message to and from the server."""

    def __post_init__(self) -> None:
        if self.server.auth_token_file is not None:
            raise InvalidOption(
                "auth_token_file", self.server.auth_token_file, "unset: callers show tokens of their own"
            )
        checked_timeout(self.timeout_s, "timeout")
        if self.max_bytes < 1:
            raise InvalidOption("max_message_mib", self.max_bytes, "1 or more")
