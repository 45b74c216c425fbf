"""One Ray at a time begins, of all that tests on this machine start.

A raylet gives its agents, Python processes that import for more than a second of CPU time each, 15 s to tell their
ports, which nothing changes (`ray_patience`), and ends without them. Several that begin at once on two cores take the
time from each other.
"""

from __future__ import annotations

import asyncio
import fcntl
import tempfile
import threading
import time
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol, TypeVar

import psutil

from support.waiting import HANG_S

LOCK = "gemray-ray-begins.lock"
NOT_UP = "The current node timed out during startup"
"""What Ray says of a node whose agents were late: the machine was busy, and may be less so the next time."""
TRIES = 3
"""Tries of a command that ends with `NOT_UP`; each has tried thrice itself."""
_LOOK_S = 0.3


class _Process(Protocol):
    @property
    def pid(self) -> int: ...


P = TypeVar("P", bound=_Process)


def rays_turn(directory: Path | None = None) -> IO[str]:
    """Wait until no other Ray begins; none does until the file is closed, or its process has died.

    Args:
        directory: of the lock's file; the machine's temporary one by default.
    """
    file = ((directory or Path(tempfile.gettempdir())) / LOCK).open("a")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


async def in_turn(start: Awaitable[P]) -> P:
    """The process that `start` starts when it is its turn; the next one has it once its Ray is up, or it has ended."""
    turn = await asyncio.to_thread(rays_turn)
    try:
        process = await start
    except BaseException:
        turn.close()
        raise
    threading.Thread(target=_pass_on, args=(turn, process.pid), daemon=True).start()
    return process


def _pass_on(turn: IO[str], pid: int) -> None:
    with turn:
        until = time.monotonic() + HANG_S
        while _begins(pid) and time.monotonic() < until:
            time.sleep(_LOOK_S)


def _begins(pid: int) -> bool:
    """Whether a process goes on without workers of a Ray: a raylet that has none waits for its agents."""
    try:
        process = psutil.Process(pid)
        children = process.children(recursive=True)
        return process.status() != psutil.STATUS_ZOMBIE and not any(map(_is_worker, children))
    except psutil.NoSuchProcess:
        return False


def _is_worker(process: psutil.Process) -> bool:
    command = ""
    with suppress(psutil.Error):
        command = " ".join(process.cmdline())
    return "default_worker.py" in command or (command.startswith("ray::") and "Agent" not in command)
