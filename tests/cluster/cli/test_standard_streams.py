"""Commands with a standard stream closed: `gemray ... >&-`, as cron jobs and supervisors start them."""

from __future__ import annotations

import subprocess

import pytest

from support.cluster.command import GEMRAY
from support.waiting import HANG_S


def closed(descriptor: int, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """A command that is started without a standard stream."""
    script = f'exec "$@" {descriptor}>&-'
    command = ["sh", "-c", script, "sh", *GEMRAY, *arguments]
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=HANG_S, check=False)


@pytest.mark.parametrize(
    ("descriptor", "code", "told"),
    [
        (0, 2, "error: prompt = '' is not allowed"),
        (1, 2, "error: prompt = '' is not allowed"),
        (2, 2, ""),
    ],
)
def test_a_closed_stream_is_no_traceback(descriptor: int, code: int, told: str) -> None:
    result = closed(descriptor, "generate", "--address", "127.0.0.1:1")
    assert (result.returncode, result.stdout) == (code, b"")
    err = result.stderr.decode()
    assert err.startswith(told)
    assert err.count("\n") == bool(told)


@pytest.mark.parametrize(("descriptor", "shows"), [(1, False), (2, True)])
def test_what_succeeds_with_a_closed_stream_succeeds(descriptor: int, shows: bool) -> None:
    result = closed(descriptor, "--version")
    assert (result.returncode, bool(result.stdout), result.stderr) == (0, shows, b"")


def test_a_closed_stream_has_the_null_device_at_its_own_descriptor() -> None:
    probe = (
        "import os, sys; from gemray.cli.standard_streams import open_closed_streams; open_closed_streams()\n"
        "for number, stream in enumerate((sys.stdin, sys.stdout)):\n"
        "    assert stream.fileno() == number and os.get_inheritable(number), stream\n"
        "    assert os.path.samestat(os.fstat(number), os.stat(os.devnull))\n"
        "assert sys.stdin.read() == ''"
    )
    command = ["sh", "-c", 'exec "$@" 0<&- 1>&-', "sh", GEMRAY[0], "-c", probe]
    result = subprocess.run(command, stderr=subprocess.PIPE, timeout=HANG_S, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
