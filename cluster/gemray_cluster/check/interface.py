"""Which network interface NCCL and gloo will use on this node, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import psutil

from gemray_cluster.check.result import CheckResult, fail, ok
from gemray_workers.errors import InvalidField
from gemray_workers.parallel.network_interface import INTERFACE_VARIABLES, choose_interface

NAME = "interface"
_PATTERN_CHARACTERS = frozenset(",=^")
"""NCCL also takes lists, exact names and exclusions (eth,ib / =eth0 / ^docker0); those are left to it."""


def check_interface(node_ip: str, environment: Mapping[str, str], *, existing: Collection[str]) -> CheckResult:
    """Make the choice that a rank on this node will make, and check that what the user set exists.

    Args:
        node_ip: the address by which Ray knows this node.
        environment: of the ranks.
        existing: names of this node's interfaces.
    """
    for variable in INTERFACE_VARIABLES:
        named = environment.get(variable, "")
        is_pattern = bool(_PATTERN_CHARACTERS & set(named))
        if named and not is_pattern and not any(name.startswith(named) for name in existing):
            return fail(NAME, f"{variable}={named} names no interface of {node_ip}: there are {', '.join(existing)}.")
    try:
        reason = choose_interface(node_ip, dict(environment))
    except InvalidField as error:
        return fail(NAME, f"no interface of this node for NCCL and gloo: {error}.")
    return ok(NAME, f"NCCL and gloo on {node_ip}: {reason}.")


def local_interfaces() -> list[str]:
    """Names of this host's interfaces."""
    return sorted(psutil.net_if_addrs())
