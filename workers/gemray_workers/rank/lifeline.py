"""A rank's end of the connection that ties its life to the coordinator's.

The kernel ends the rank when the connection closes, whatever the rank's threads do (wait in a collective, hold the
interpreter's lock in a driver's call), even if it is stopped. A coordinator that was killed closes it at once; one
whose host is gone, or cannot be reached, within `SILENCE_S`.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket

from gemray_workers.errors import CommunicationError

SILENCE_S = 20
"""Seconds without a sign from the coordinator's host after which it counts as gone; the channel waits as long."""
_PROBES = 3
_CONNECT_S = 20.0


def hold_lifeline(host: str, port: int) -> socket.socket:
    """Connect to the coordinator; from now on this process ends, by SIGKILL, when the connection does.

    Returns the connection: closing it ends this tie, and ends nothing.

    Raises CommunicationError when nobody answers.
    """
    try:
        connection = socket.create_connection((host, port), _CONNECT_S)
    except OSError as error:
        raise CommunicationError(f"the coordinator cannot be reached at {host}:{port}: {error}") from error
    connection.settimeout(None)
    _probe_when_silent(connection)
    # Nothing is ever sent over it, so the only thing that can happen to it is its end.
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([connection], [], [], 0)[0]:  # it ended before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)
    return connection


def _probe_when_silent(connection: socket.socket) -> None:
    interval_s = SILENCE_S // (_PROBES + 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
