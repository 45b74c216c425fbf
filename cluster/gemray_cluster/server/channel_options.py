"""Limits of the server's end of a connection; those that a client has as well are in `gemray.channel_options`."""

from __future__ import annotations

from gemray.channel_options import ChannelOptions, both_sides

MIN_PING_INTERVAL_MS = 5_000


def server_options(max_message_bytes: int, max_connection_age_s: float | None = None) -> ChannelOptions:
    """Options of the server."""
    age: ChannelOptions = ()
    if max_connection_age_s is not None:
        # gRPC varies it by a tenth, so that connections do not all come back at once, and lets streams go on.
        age = (("grpc.max_connection_age_ms", max(1, int(max_connection_age_s * 1e3))),)
    return (
        *age,
        *both_sides(max_message_bytes),
        # Two servers must never share a port in silence.
        ("grpc.so_reuseport", 0),
        # Clients that ping often are answered, not cut off.
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
    )
