"""Exit codes of the commands that ask a server."""

from __future__ import annotations

FAILED = 1
WRONG = 2
UNREACHABLE = 5
INTERRUPTED = 130
"""1: it failed. 2: what was asked for is wrong. 5: no answer from the server. 130: interrupted."""


def exit_code_of(error: Exception) -> int | None:
    """The code of an error that is told in a sentence; None for one that nobody foresaw."""
    from gemray.cli.numbers import InvalidNumber  # here, as typer takes a while to load

    if isinstance(error, InvalidNumber):
        return WRONG
    from gemray.client import errors  # here, so that --help loads no gRPC

    if isinstance(error, errors.InvalidOption | errors.RequestRefused):
        return WRONG
    if isinstance(error, errors.ServerUnreachable):
        return UNREACHABLE
    return FAILED if isinstance(error, errors.ClientError) else None
