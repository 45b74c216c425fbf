"""Limits of a connection, stated once for both sides (gRPC's own defaults differ between them)."""

from __future__ import annotations

import ipaddress

ChannelOptions = tuple[tuple[str, int], ...]

DEFAULT_MAX_MESSAGE_BYTES = 16 << 20
NO_PROXY = ("grpc.enable_http_proxy", 0)
"""gRPC takes http_proxy, https_proxy and grpc_proxy for every address that no_proxy does not name."""
KEEPALIVE_TIME_MS = 30_000
"""Idle time after which a side asks whether the other is still there: a vanished client is found within a minute."""
KEEPALIVE_TIMEOUT_MS = 20_000


def client_options(address: str, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> ChannelOptions:
    """Options of a client of the server at `address`, HOST:PORT."""
    options = both_sides(max_message_bytes)
    return (*options, NO_PROXY) if is_this_machine(address.rpartition(":")[0]) else options


def is_this_machine(host: str) -> bool:
    """Whether `host` means this machine to a client on it: a proxy would look for the server on its own machine."""
    name = host.strip("[]").rstrip(".").lower()
    addresses = _addresses(name)
    is_loopback = any(address.is_loopback for address in addresses)
    return name == "localhost" or name.endswith(".localhost") or is_loopback or is_every_interface(host)


def is_every_interface(host: str) -> bool:
    """Whether `host` means all addresses of this machine to a server."""
    return any(address.is_unspecified for address in _addresses(host.strip("[]")))


def from_here(host: str) -> str:
    """The host by which clients on this machine reach a server that listens on `host`."""
    if not is_every_interface(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"


def host_and_port(host: str, port: int) -> str:
    """HOST:PORT, with the brackets that an IPv6 address takes."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening_in_words(host: str, port: int, url: str = "{}") -> str:
    """Where a server listens; the last word is what clients on this machine ask. `url` has {} for HOST:PORT."""
    here = url.format(host_and_port(from_here(host), port))
    if not is_every_interface(host):
        return here
    return f"{url.format(host_and_port(host, port))}, all addresses of this machine: from here {here}"


def _addresses(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The address that is written as `name`, and the IPv4 one inside it; none for other names."""
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return []
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return [address] if mapped is None else [address, mapped]


def both_sides(max_message_bytes: int) -> ChannelOptions:
    """Options that server and client have alike."""
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
