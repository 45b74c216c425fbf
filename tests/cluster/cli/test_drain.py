"""`gemray drain` against a process that looks like a server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemray_cluster.cli.drain import is_serve_command
from support.waiting import HANG_S

GEMRAY = [sys.executable, "-c", "from gemray_cluster.cli import main; main()"]
SERVER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: {on_signal})
print("up", flush=True)
while True:
    signal.pause()
"""


class Server:
    """A script called gemray, run as ``gemray serve``."""

    def __init__(self, directory: Path, on_signal: str) -> None:
        script = directory / "gemray"
        script.write_text(SERVER.format(on_signal=on_signal))
        self.process = subprocess.Popen([sys.executable, str(script), "serve"], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"up\n"


def drain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GEMRAY, "drain", *arguments], capture_output=True, text=True, timeout=HANG_S, check=False)


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        server.process.kill()
        server.process.wait()


def test_it_waits_until_the_server_has_ended(tmp_path: Path, servers: list[Server]) -> None:
    servers.append(Server(tmp_path, "sys.exit(7)"))
    pid = servers[0].process.pid
    # This test is the server's parent: who does not collect a dead child keeps it in the table of processes.
    drained = subprocess.Popen([*GEMRAY, "drain", "--pid", str(pid)], stderr=subprocess.PIPE, text=True)
    assert servers[0].process.wait(HANG_S) == 7, "told by SIGTERM"
    _, said = drained.communicate(timeout=HANG_S)
    assert (drained.returncode, said) == (0, f"draining: waiting for process {pid}\nended\n")


def test_a_server_that_does_not_end_is_an_error(tmp_path: Path, servers: list[Server]) -> None:
    servers.append(Server(tmp_path, "None"))
    result = drain("--pid", str(servers[0].process.pid), "--deadline-s", "0.1")
    assert result.returncode == 1
    assert result.stderr.endswith("has not ended within 0.1 s\n")
    assert servers[0].process.poll() is None


def test_another_process_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        result = drain("--pid", str(other.pid))
        assert other.poll() is None
        assert other.stdin is not None
        other.stdin.write(b"\n")
    assert result.returncode == 2
    assert "a gemray serve of this user" in result.stderr
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
