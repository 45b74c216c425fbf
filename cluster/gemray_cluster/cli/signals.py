"""Signals that `gemray serve` hears: two end it, one asks for a reload or says that its terminal is gone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

RELOAD = "SIGHUP: certificates and tokens are read again when they change, all else at a start; SIGTERM ends the server"


def listen_to_signals(end: Callable[[], None], tell: Callable[[str], None]) -> None:
    """Let signals call `end`, or `tell` why one does not. SIGHUP stays ignored where nohup has it so."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, end if _has_terminal() else lambda: tell(RELOAD))


def _has_terminal() -> bool:
    """Whether a terminal controls this process."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
