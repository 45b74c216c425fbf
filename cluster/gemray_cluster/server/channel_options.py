"""Limits of a connection, stated once for both sides (gRPC's own defaults differ between them)."""

from __future__ import annotations

ChannelOptions = tuple[tuple[str, int], ...]

DEFAULT_MAX_MESSAGE_BYTES = 16 << 20
KEEPALIVE_TIME_MS = 30_000
"""Idle time after which a side asks whether the other is still there: a vanished client is found within a minute."""
KEEPALIVE_TIMEOUT_MS = 20_000
MIN_PING_INTERVAL_MS = 5_000


def server_options(max_message_bytes: int) -> ChannelOptions:
    """Options of the server."""
    return (
        *_both_sides(max_message_bytes),
        # Two servers must never share a port in silence.
        ("grpc.so_reuseport", 0),
        # Clients that ping often are answered, not cut off.
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
    )


def client_options(max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> ChannelOptions:
    """Options of a client."""
    return _both_sides(max_message_bytes)


def _both_sides(max_message_bytes: int) -> ChannelOptions:
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
