"""gemray drain: let a server on this machine finish its requests and end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

import psutil
import typer

from gemray.cli.account import tell
from gemray_workers.errors import GemrayError, InvalidField, Summary


class NoServer(GemrayError):
    """There is nothing to drain."""


class StillRunning(GemrayError):
    """A server has not ended within the deadline."""


def drain(
    pid: Annotated[
        int | None, typer.Option(metavar="PID", help="The server's process (default: the only one of this user).")
    ] = None,
    deadline_s: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="How long to wait for its end; 0 does not wait (default: until it has ended, by its own deadlines).",
        ),
    ] = None,
) -> None:
    """Drain a server on this machine, and wait until it has ended.

    It takes no new requests, tells its clients to go elsewhere, lets live requests finish for at most its own
    --drain-deadline-s, and ends. The same as SIGTERM.
    """
    server = _server(pid)
    server.send_signal(signal.SIGTERM)
    if deadline_s == 0:
        return
    tell(f"draining: waiting for process {server.pid}")
    try:
        server.wait(deadline_s)
    except psutil.TimeoutExpired:
        raise StillRunning(f"process {server.pid} has not ended within {deadline_s:g} s") from None
    tell("ended")


def _server(pid: int | None) -> psutil.Process:
    """The process to drain; raises NoServer, or InvalidField when there is no telling which."""
    running = {process.pid: process for process in psutil.process_iter() if _is_server(process)}
    if pid is None:
        if not running:
            raise NoServer("no gemray serve of this user runs on this machine")
        if len(running) > 1:
            pids = ", ".join(map(str, sorted(running)))
            raise InvalidField("pid", Summary("unset"), f"one of {pids}: several gemray serve of this user run here")
        (server,) = running.values()
        return server
    if pid not in running:
        raise InvalidField("pid", pid, "a gemray serve of this user on this machine")
    return running[pid]


def _is_server(process: psutil.Process) -> bool:
    try:
        command, owner = process.cmdline(), process.uids().effective
    except psutil.Error:
        return False
    return owner == os.geteuid() and is_serve_command(command)


def is_serve_command(command: list[str]) -> bool:
    """Whether a process's arguments are those of ``gemray serve``, the script run by a Python or by itself."""
    names = [Path(argument).name for argument in command[:2]]
    return any(name == "gemray" and command[i + 1 : i + 2] == ["serve"] for i, name in enumerate(names))
