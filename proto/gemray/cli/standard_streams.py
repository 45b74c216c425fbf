"""Standard streams that whoever started the command has closed."""

from __future__ import annotations

import os
import sys
from typing import Literal, TextIO


def open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed, which Python has as None.

    What is written there is lost, as its caller wanted; reading finds the end. In this order each file gets the lowest
    free descriptor, its stream's own, so that nothing that is opened later is taken for a standard stream.
    """
    if sys.stdin is None:
        sys.stdin = _null("r")
    if sys.stdout is None:
        sys.stdout = _null("w")
    if sys.stderr is None:
        sys.stderr = _null("w")


def _null(mode: Literal["r", "w"]) -> TextIO:
    stream: TextIO = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    os.set_inheritable(stream.fileno(), True)
    return stream
