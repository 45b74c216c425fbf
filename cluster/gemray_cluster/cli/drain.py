"""gemray drain: let a server on this machine finish its requests and end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from gemray.cli.account import tell
from gemray.cli.numbers import integer, seconds
from gemray_cluster.cli.drain_socket import Order, Outcome, give_order, listening_pids, read_outcome
from gemray_cluster.cli.exit_codes import CUT
from gemray_cluster.server.errors import RequestsCut
from gemray_workers.errors import GemrayError, InvalidField, Summary

_AGAIN_S = 0.2
"""Between looks at a server that does not listen: it is starting, or about to end."""


class NoServer(GemrayError):
    """There is nothing to drain."""


class StillRunning(GemrayError):
    """A server has not ended within the deadline."""


class EndedOtherwise(GemrayError):
    """A server has ended, but not by finishing its requests, as far as is known."""


def drain(
    pid: Annotated[
        int | None,
        integer("pid", "The server's process (default: the only one of this user)", least=1, metavar="PID"),
    ] = None,
    deadline_s: Annotated[
        float | None,
        seconds(
            "deadline_s",
            "How long to wait for its end, 0 not to wait (default: until it has ended, by its own deadlines)",
            excludes_least=False,
        ),
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="End it at once: its live requests are cut.")] = False,
) -> None:
    """Drain a server on this machine, and wait until it has ended.

    It takes no new requests, tells its clients to go elsewhere, lets live requests finish for at most its own
    --drain-deadline-s, and ends. A server that already drains goes on with it. Exits with 0 when it has ended and no
    request was cut, with 5 when some were, and with 1 when it has not ended in time or has ended otherwise.
    """
    server = _server(pid)
    until = None if deadline_s is None else time.monotonic() + deadline_s
    order = Order.END_NOW if now else Order.DRAIN
    if deadline_s == 0:
        connection = give_order(server.pid, order)
        if connection is None:
            raise StillRunning(f"process {server.pid} takes no orders now: it is starting, or about to end")
        connection.close()
        return
    tell(f"{'ending' if now else 'draining'}: waiting for process {server.pid}")
    try:
        outcome = _outcome(server, order, until)
        server.wait(_left_s(until))
    except (TimeoutError, psutil.TimeoutExpired):
        raise StillRunning(f"process {server.pid} has not ended within {deadline_s:g} s") from None
    _tell_outcome(server.pid, outcome, now)


def _outcome(server: psutil.Process, order: Order, until: float | None) -> Outcome | None:
    """Give the order as soon as the server takes it, and wait for what comes of it; None when nobody tells."""
    while (connection := give_order(server.pid, order)) is None:
        if not _runs(server):
            return None
        left = _left_s(until)
        time.sleep(_AGAIN_S if left is None else min(_AGAIN_S, left))
    with connection:
        return read_outcome(connection, _left_s(until))


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _left_s(until: float | None) -> float | None:
    """Seconds that are left; raises TimeoutError when none are."""
    if until is None:
        return None
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _tell_outcome(pid: int, outcome: Outcome | None, now: bool) -> None:
    """Say how a server has ended; raises GemrayError unless it was as wanted."""
    if outcome is None:
        raise EndedOtherwise(f"process {pid} has ended without telling how: it may have cut requests")
    if outcome.code == 0 or now:
        tell(outcome.said)
    elif outcome.code == CUT:
        raise RequestsCut(outcome.said)
    else:
        raise EndedOtherwise(f"process {pid} has ended: {outcome.said}")


def _server(pid: int | None) -> psutil.Process:
    """The process to drain; raises NoServer, or InvalidField when there is no telling which."""
    listening = listening_pids()
    running = {process.pid: process for process in psutil.process_iter() if _is_server(process, listening)}
    if pid is None:
        if not running:
            raise NoServer("no gemray serve of this user runs on this machine")
        if len(running) > 1:
            pids = ", ".join(map(str, sorted(running)))
            raise InvalidField("pid", Summary("unset"), f"one of {pids}: several gemray serve of this user run here")
        (server,) = running.values()
        return server
    if pid not in running:
        those = ", ".join(map(str, sorted(running))) or "but none runs"
        raise InvalidField("pid", pid, f"must be the process of a gemray serve that this user runs here ({those})")
    return running[pid]


def _is_server(process: psutil.Process, listening: set[int]) -> bool:
    """Whether it is a server of this user: one that listens to us, or one that starts and will."""
    try:
        command, owner = process.cmdline(), process.uids().effective
    except psutil.Error:
        return False
    return owner == os.geteuid() and (process.pid in listening or is_serve_command(command))


def is_serve_command(command: list[str]) -> bool:
    """Whether a process's arguments are those of ``gemray serve``, the script run by a Python or by itself."""
    names = [Path(argument).name for argument in command[:2]]
    return any(name == "gemray" and command[i + 1 : i + 2] == ["serve"] for i, name in enumerate(names))
