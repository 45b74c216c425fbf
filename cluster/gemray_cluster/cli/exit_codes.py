"""Exit codes of `gemray`, the same for every command."""

from __future__ import annotations

from collections.abc import Mapping

from gemray.cli import exit_codes as of_clients
from gemray.cli.exit_codes import FAILED
from gemray_cluster.server.errors import RequestsCut
from gemray_workers.errors import AddressUnavailable, CapacityError, CheckpointError, GemrayError, InvalidField

CUT = 5
"""Requests had not finished within a drain's deadline."""
_CODES: Mapping[type[Exception], int] = {
    InvalidField: of_clients.WRONG,
    CheckpointError: of_clients.WRONG,
    CapacityError: 3,
    AddressUnavailable: 4,
    RequestsCut: CUT,
    GemrayError: FAILED,
}
"""2: what was asked for is wrong. 3: not enough resources. 4: the address is taken. 5: a drain cut requests."""


def exit_code_of(error: Exception) -> int | None:
    """The code of the nearest class that has one, or of a client's error; None for one that nobody foresaw."""
    code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), None)
    return of_clients.exit_code_of(error) if code is None else code
