"""The processes of a Ray that was started here: kept apart from the server's own, watched, and ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import ray
from ray._private import services

logger = logging.getLogger(__name__)

VITAL = ("gcs_server", "raylet")
"""Without these Ray neither places nor watches anything; the others write logs and statistics."""
_WATCH_S = 0.2


@contextmanager
def in_sessions_of_their_own() -> Iterator[None]:
    """Processes that Ray starts in the block lead sessions of their own.

    A signal to the server's process group, as `timeout` and terminals send it, must not reach them: the server drains
    on it, and needs them until it has. That they end with the server stays as it is (Ray asks for a parent-death
    signal), and whoever ends the server's whole cgroup ends them, too.
    """
    popen = getattr(services, "ConsolePopen", None)
    if popen is None:
        logger.warning(
            "this version of Ray starts its processes in a way unknown here: signals to our group reach them"
        )
        yield
        return
    vars(services)["ConsolePopen"] = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        vars(services)["ConsolePopen"] = popen


class OwnProcesses:
    """Processes of the Ray that this process has just started."""

    def __init__(self) -> None:
        """Look them up."""
        node: Any = ray._private.worker._global_node
        self._vital = [(name, info.process) for name in VITAL for info in node.all_processes.get(name, [])]
        self._sessions = {process.pid for _, process in self._vital} - {os.getsid(0)}

    def dead(self) -> str | None:
        """Which of the vital ones has ended, in words; None while all run."""
        for name, process in self._vital:
            code = process.poll()
            if code is not None:
                how = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
                return f"the {name} of our own Ray has ended (pid {process.pid}, {how})"
        return None

    async def lost(self) -> str:
        """Return when a vital one has ended, with the cause."""
        while (cause := self.dead()) is None:
            await asyncio.sleep(_WATCH_S)
        return cause

    def kill(self) -> None:
        """End them and all that they have started, ranks included, at once. Idempotent."""
        for pid in psutil.pids():
            try:
                if os.getsid(pid) in self._sessions:
                    os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
