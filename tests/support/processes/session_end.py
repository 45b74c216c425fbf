"""What a test session started ends with it, however it ends: servers in sessions of their own, Ray and its ranks.

A process beside pytest waits for the end of a pipe that only pytest holds, then kills whatever carries the session's
mark in its environment, which children inherit. Run as a script it is that process: ``session_end.py NAME=MARK``.
A session that ends by itself says so over the pipe: one that left nothing need not wait for what was about to start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

MARK = "TEST_SESSION_OF_GEMRAY"  # no GEMRAY_..., which would be a setting
QUIET_S = 1.0
"""Nothing new with the mark for so long: no process was about to start another one."""
LONGEST_S = 60.0
LOOK_S = 0.1
ENDED = b"ended"
"""What a session says that starts nothing any more."""
ENDER = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_configure(config: pytest.Config) -> None:
    """Mark what will be started, and start what ends it."""
    mark = f"{MARK}={uuid.uuid4().hex}"
    # Its own environment has no such mark, and Ctrl-C does not reach it.
    config.stash[ENDER] = subprocess.Popen(
        [sys.executable, __file__, mark], stdin=subprocess.PIPE, start_new_session=True
    )
    os.environ[MARK] = mark.partition("=")[2]


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what is left now."""
    if (ender := config.stash.get(ENDER, None)) is not None:
        ender.communicate(ENDED)


def marked(mark: str) -> list[int]:
    """Ids of other processes that were started with the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if mark.encode() in environment.split(b"\0") and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def kill_marked(mark: str) -> None:
    """Kill them, and those that they were about to start."""
    began = quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < QUIET_S and time.monotonic() - began < LONGEST_S:
        for process in marked(mark):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
            quiet_since = time.monotonic()
        time.sleep(LOOK_S)


def is_any_left(mark: str) -> bool:
    """Whether one of two looks finds a process with the mark: one may have started another and ended between."""
    if marked(mark):
        return True
    time.sleep(LOOK_S)
    return bool(marked(mark))


if __name__ == "__main__":
    has_ended = sys.stdin.buffer.read() == ENDED
    if not has_ended or is_any_left(sys.argv[1]):
        kill_marked(sys.argv[1])
