"""What SIGHUP means to a server: with a terminal, without one, and under nohup."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress

from gemray_cluster.cli.signals import RELOAD

SERVER = """
import asyncio
from gemray_cluster.cli.signals import listen_to_signals

async def main():
    ended = asyncio.Event()
    listen_to_signals(ended.set, lambda said: print(said, flush=True))
    print("listening", flush=True)
    await ended.wait()
    print("ended", flush=True)

asyncio.run(main())
"""


def _session(*before: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*before, sys.executable, "-c", SERVER],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    return process


def test_without_a_terminal_it_ends_nothing() -> None:
    process = _session()
    assert process.stdout is not None
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == f"{RELOAD}\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate()[0] == "ended\n"
    assert process.returncode == 0


def test_under_nohup_it_is_not_heard() -> None:
    process = _session("nohup")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.communicate()[0] == "ended\n"


def test_the_end_of_its_terminal_ends_it() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", SERVER])
    with os.fdopen(terminal, "rb", buffering=0) as its_output:
        said = b""
        while b"listening" not in said:
            said += its_output.read(100)
        os.kill(pid, signal.SIGHUP)
        with suppress(OSError):  # EIO: the server has left its terminal, which must be there until then
            while more := its_output.read(100):
                said += more
    assert said.endswith(b"ended\r\n")
    assert RELOAD.encode() not in said
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
