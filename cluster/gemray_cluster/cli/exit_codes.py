"""Exit codes of `gemray`, the same for every command."""

from __future__ import annotations

from collections.abc import Mapping

from gemray_cluster.client.errors import RequestRefused, ServerUnreachable
from gemray_cluster.server.errors import AddressUnavailable
from gemray_workers.errors import CapacityError, CheckpointError, GemrayError, InvalidField

FAILED = 1
INTERRUPTED = 130

_CODES: Mapping[type[Exception], int] = {
    InvalidField: 2,
    CheckpointError: 2,
    RequestRefused: 2,
    CapacityError: 3,
    AddressUnavailable: 4,
    ServerUnreachable: 5,
}
"""2: what was asked for is wrong. 3: not enough resources. 4: the address is taken. 5: no answer from the server."""


def exit_code_of(error: GemrayError) -> int:
    """The code of the nearest class that has one."""
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), FAILED)
