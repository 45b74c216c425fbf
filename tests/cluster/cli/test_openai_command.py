"""`gemray openai` and `gemray demo --openai` as commands: what they say, refuse and warn of."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import socket
from contextlib import suppress
from typing import Any

import pytest

from gemray.cli.openai import openai
from gemray.client import InvalidOption
from gemray.openai.serve import RELOAD
from support.cluster.command import GEMRAY, end_in_order, gemray, killed_at_last
from support.waiting import HANG_S


@pytest.mark.parametrize("command", [("openai", "--port"), ("demo", "--openai", "--http-port")])
def test_a_port_that_is_taken_is_told_at_once(command: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = gemray(*command, str(taken.getsockname()[1]))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: host, port = '127.0.0.1:")
    assert line.endswith("(Address already in use)")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"address": "nowhere"}, "address"),
        ({"port": 70000}, "port"),
        ({"timeout": 0}, "timeout"),
        ({"tls_ca_file": "none"}, "tls_ca_file"),
        ({"http_tls_cert_file": "none"}, "http_tls_key_file"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        openai(**flags)
    assert caught.value.field == named


async def test_the_end_of_a_terminal_that_it_does_not_have_ends_nothing() -> None:
    process = await asyncio.create_subprocess_exec(
        *GEMRAY,
        *("openai", "--address", "127.0.0.1:1", "--port", "0"),
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    async with killed_at_last(process):
        assert process.stderr is not None
        assert (await asyncio.wait_for(process.stderr.readline(), HANG_S)).startswith(b"ready: ")
        process.send_signal(signal.SIGHUP)
        assert await asyncio.wait_for(process.stderr.readline(), HANG_S) == f"{RELOAD}\n".encode()
        await end_in_order(process)


def test_the_end_of_its_terminal_ends_it_in_order() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(GEMRAY[0], [*GEMRAY, "openai", "--address", "127.0.0.1:1", "--port", "0"])
    with os.fdopen(terminal, "rb", buffering=0) as its_output:
        said = b""
        while b"ready" not in said:
            said += its_output.read(100)
        os.kill(pid, signal.SIGHUP)
        with suppress(OSError):  # EIO: it has left its terminal, which must be there until then
            while its_output.read(100):
                pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


async def test_an_open_port_without_tls_is_warned_of() -> None:
    process = await asyncio.create_subprocess_exec(
        *GEMRAY,
        "openai",
        "--address",
        "127.0.0.1:1",
        "--host",
        "0.0.0.0",
        "--port",
        "0",
        stderr=asyncio.subprocess.PIPE,
    )
    async with killed_at_last(process):
        assert process.stderr is not None
        lines = [await asyncio.wait_for(process.stderr.readline(), HANG_S) for _ in range(2)]
        assert lines[0].startswith(b"warning: 0.0.0.0 is reached from other machines")
        assert re.fullmatch(
            rb"ready: http://0\.0\.0\.0:(\d+)/v1, all addresses of this machine: from here "
            rb"http://127\.0\.0\.1:\1/v1 \(server 127\.0\.0\.1:1\)\n",
            lines[1],
        )
        await end_in_order(process)
