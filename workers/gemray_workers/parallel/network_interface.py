"""Which network interface carries the collectives of this node.

gloo binds to the address of the host name, and where that resolves to 127.0.0.1 a gang over two hosts cannot
connect; NCCL guesses among several interfaces. Both are told instead: the one that holds the node's own address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import MutableMapping

import psutil

from gemray_workers.errors import InvalidField

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def choose_interface(node_ip: str, environment: MutableMapping[str, str]) -> str:
    """Name the interface that holds `node_ip` in `environment`, for gloo and NCCL, where the user has not set one.

    Args:
        node_ip: IPv4 or IPv6 address by which the other nodes know this one. Where both variables are set it may be one
            that no interface holds, as that of a host behind address translation.
        environment: ``os.environ`` of the process that is about to join a gang.

    Returns:
        The choice and its reason in words, for the log.

    Raises:
        InvalidField: no interface of this node holds the address, and one must be found.
    """
    kept = {variable: environment[variable] for variable in INTERFACE_VARIABLES if environment.get(variable)}
    as_set = "kept as set: " + ", ".join(f"{variable}={value}" for variable, value in kept.items())
    if len(kept) == len(INTERFACE_VARIABLES):
        return as_set
    name = _holder_of(node_ip)
    for variable in INTERFACE_VARIABLES:
        environment[variable] = kept.get(variable, name)
    found = f"{name} holds the node's address {node_ip}"
    return f"{found}; {as_set}" if kept else found


def _holder_of(node_ip: str) -> str:
    try:
        wanted = ipaddress.ip_address(node_ip)
    except ValueError as error:
        raise InvalidField("node_ip", node_ip, "an IPv4 or IPv6 address") from error
    held: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            text = entry.address.partition("%")[0]  # link-local IPv6 carries its zone: fe80::1%eth0
            try:
                address = ipaddress.ip_address(text)
            except ValueError:
                continue  # a hardware address
            if address == wanted:
                return name
            held[text] = name
    known = ", ".join(f"{address} ({name})" for address, name in held.items())
    raise InvalidField("node_ip", node_ip, f"an address of this node: {known}")
