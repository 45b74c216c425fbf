"""The socket by which `gemray drain` reaches a server on the same machine, and learns how it ended.

A signal would not do: a second SIGTERM means "end without waiting", and the status of a process that is not one's child
cannot be read. The socket has a name of Linux's abstract namespace, so no file is left behind; the name has the
namespace of the server's pid in it, as containers may share a network and each have a process 1.

The client sends an order and a newline. The server answers once, with an `Outcome` as JSON, when it has ended its work.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

logger = logging.getLogger(__name__)

_UCRED = struct.Struct("3i")
"""pid, uid, gid, as SO_PEERCRED tells them."""
_LONGEST_ANSWER = 1 << 16


class Order(StrEnum):
    """What a server can be told."""

    DRAIN = "drain"
    """To take no more requests, finish the live ones and end. The same again changes nothing."""
    END_NOW = "end-now"


@dataclass(frozen=True)
class Outcome:
    """How a server has ended."""

    code: int
    """0 when no request was cut; else the exit code of what went wrong."""
    said: str
    """In words."""


class DrainSocket:
    """The server's end."""

    def __init__(self, follow: Callable[[Order], None]) -> None:
        """`follow` is called for each order, in the event loop."""
        self._follow = follow
        self._server: asyncio.Server | None = None
        self._waiting: list[asyncio.StreamWriter] = []

    async def open(self) -> None:
        """Listen; a server that cannot is still one, which ends on signals alone."""
        try:
            self._server = await asyncio.start_unix_server(self._serve, _name(os.getpid()))
        except OSError as error:
            logger.warning("gemray drain will not reach this server, but SIGTERM does: %s", error)

    def close(self, outcome: Outcome) -> None:
        """Tell all who wait how the server has ended, and listen no more. Waits for nothing."""
        if self._server is not None:
            self._server.close()
        for writer in self._waiting:
            writer.write(json.dumps(asdict(outcome)).encode() + b"\n")  # a socket's buffer takes it at once
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, uid = _peer(writer.get_extra_info("socket"))
        line = (await reader.readline()).decode(errors="replace").strip()
        if uid not in (os.geteuid(), 0) or line not in list(Order):
            writer.close()
            return
        self._waiting.append(writer)
        self._follow(Order(line))


def give_order(pid: int, order: Order) -> socket.socket | None:
    """Send an order to a server; a connection on which its outcome will come, or None when it does not listen now."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(_name(pid))
        if _peer(connection)[0] != pid:  # anybody may take a name
            connection.close()
            return None
        connection.sendall(order.encode() + b"\n")
    except OSError:
        connection.close()
        return None
    return connection


def read_outcome(connection: socket.socket, timeout_s: float | None) -> Outcome | None:
    """Wait for a server's outcome; None when it has ended without one. Raises TimeoutError."""
    connection.settimeout(timeout_s)
    try:
        with connection.makefile("rb") as answers:
            line = answers.readline(_LONGEST_ANSWER)
    except ConnectionError:
        return None
    return Outcome(**json.loads(line)) if line.endswith(b"\n") else None


def listening_pids() -> set[int]:
    """Processes, in our namespace of pids, whose sockets have the name of a server's."""
    try:
        table = Path("/proc/net/unix").read_text(errors="replace")
        name = _name("")[1:]
    except OSError:
        return set()
    return {int(pid) for pid in re.findall(rf" @{name}(\d+)$", table, re.MULTILINE)}


def _name(pid: int | str) -> str:
    return f"\0gemray-serve-{Path('/proc/self/ns/pid').stat().st_ino}-{pid}"


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The pid and the uid at a socket's other end."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid
