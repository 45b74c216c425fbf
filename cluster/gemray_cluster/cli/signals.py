"""Signals that `gemray serve` hears: two end it, one asks for a reload or says that its terminal is gone."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from gemray.cli.terminal import has_terminal

RELOAD = "SIGHUP: certificates and tokens are read again when they change, all else at a start; SIGTERM ends the server"


def listen_to_signals(end: Callable[[], None], tell: Callable[[str], None]) -> None:
    """Let signals call `end`, or `tell` why one does not. SIGHUP stays ignored where nohup has it so."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, end if has_terminal() else lambda: tell(RELOAD))
