"""`gemray drain` against a process that looks like a server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemray_cluster.cli.drain import is_serve_command
from support.cluster.command import GEMRAY
from support.waiting import HANG_S

SERVER = """
import asyncio, os, sys
from gemray_cluster.cli.drain_socket import DrainSocket, Outcome

async def serve():
    told = asyncio.Queue()
    drains = DrainSocket(told.put_nowait)
    await drains.open()
    print("up", flush=True)
    asyncio.get_running_loop().add_reader(0, told.put_nowait, "end")
    while (order := await told.get()) != "end":
        print(order, flush=True)
    asyncio.get_running_loop().remove_reader(0)
    said = sys.stdin.readline().strip()
    if said == "vanish":
        os._exit(9)
    drains.close(Outcome(int(said), "so it ended"))
    return int(said)

sys.exit(asyncio.run(serve()))
"""
"""It says which orders come, and ends as a line of its stdin says."""


class Server:
    """A process that takes orders as ``gemray serve`` does."""

    def __init__(self, directory: Path) -> None:
        script = directory / "embedding.py"
        script.write_text(SERVER)
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.said() == "up"

    def said(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, how: str) -> None:
        """End as told."""
        self.process.communicate(how + "\n", timeout=HANG_S)


def drain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GEMRAY, "drain", *arguments], capture_output=True, text=True, timeout=HANG_S, check=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path)
    yield started
    started.process.kill()
    started.process.communicate()


@pytest.mark.parametrize(
    ("how", "code", "account"),
    [
        ("0", 0, "so it ended"),
        ("5", 5, "error: so it ended"),
        ("1", 1, "error: process {pid} has ended: so it ended"),
        ("vanish", 1, "error: process {pid} has ended without telling how: it may have cut requests"),
    ],
)
def test_it_tells_how_the_server_has_ended(server: Server, how: str, code: int, account: str) -> None:
    pid = server.process.pid
    # This test is the server's parent: who does not collect a dead child keeps it in the table of processes.
    drained = subprocess.Popen([*GEMRAY, "drain", "--pid", str(pid)], stderr=subprocess.PIPE, text=True)
    assert server.said() == "drain"
    server.end(how)
    _, said = drained.communicate(timeout=HANG_S)
    assert said == f"draining: waiting for process {pid}\n{account.format(pid=pid)}\n"
    assert drained.returncode == code


def test_a_server_that_does_not_end_is_an_error(server: Server) -> None:
    result = drain("--pid", str(server.process.pid), "--deadline-s", "2")
    assert result.returncode == 1
    assert result.stderr.endswith("has not ended within 2 s\n")
    assert server.process.poll() is None


def test_each_order_reaches_the_server(server: Server) -> None:
    pid = str(server.process.pid)
    for more, order in (((), "drain"), ((), "drain"), (("--now",), "end-now")):
        assert drain("--pid", pid, "--deadline-s", "0", *more).returncode == 0
        assert server.said() == order
    assert server.process.poll() is None


def test_another_process_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        result = drain("--pid", str(other.pid))
        assert other.poll() is None
        assert other.stdin is not None
        other.stdin.write(b"\n")
    assert result.returncode == 2
    assert "must be the process of a gemray serve that this user runs here" in result.stderr
    assert other.returncode == 0


@pytest.mark.parametrize(
    ("command", "is_server"),
    [
        (["/opt/venv/bin/python", "/opt/venv/bin/gemray", "serve", "--model", "m"], True),
        (["gemray", "serve"], True),
        (["/usr/bin/gemray", "generate", "serve"], False),
        (["/bin/bash", "-c", "exec gemray serve", "gemray", "serve"], False),
        (["gemray"], False),
        ([], False),
    ],
)
def test_what_is_taken_for_a_server(command: list[str], is_server: bool) -> None:
    assert is_serve_command(command) is is_server
