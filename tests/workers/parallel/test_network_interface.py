"""Which network interface a gang's ranks use."""

from __future__ import annotations

import psutil
import pytest

from gemray_workers.errors import InvalidField
from gemray_workers.parallel.network_interface import choose_interface


def test_the_interface_of_the_loopback_address() -> None:
    environment: dict[str, str] = {}
    reason = choose_interface("127.0.0.1", environment)
    name = environment["GLOO_SOCKET_IFNAME"]
    assert "127.0.0.1" in [entry.address for entry in psutil.net_if_addrs()[name]]
    assert environment == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    assert reason == f"{name} holds the node's address 127.0.0.1"


def test_an_interface_that_the_user_set_is_kept() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "ib0"}
    reason = choose_interface("127.0.0.1", environment)
    assert environment["NCCL_SOCKET_IFNAME"] == "ib0"
    held = f"{environment['GLOO_SOCKET_IFNAME']} holds the node's address 127.0.0.1"
    assert reason == f"{held}; kept as set: NCCL_SOCKET_IFNAME=ib0"


def test_an_address_of_no_interface_is_none_of_our_concern_where_the_user_set_them() -> None:
    """As on a host that the others know by an address of their router."""
    environment = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}
    reason = choose_interface("192.0.2.77", environment)
    assert reason == "kept as set: GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=ib0"
    assert environment == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}


@pytest.mark.parametrize(("node_ip", "allowed"), [("192.0.2.77", "127.0.0.1"), ("localhost", "an IPv4 or IPv6")])
def test_an_address_of_another_node_is_refused(node_ip: str, allowed: str) -> None:
    environment = {"NCCL_SOCKET_IFNAME": "ib0"}
    with pytest.raises(InvalidField, match=rf"node_ip = '{node_ip}' is not allowed: .*{allowed}"):
        choose_interface(node_ip, environment)
    assert environment == {"NCCL_SOCKET_IFNAME": "ib0"}
