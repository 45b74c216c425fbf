"""Is the server's port free."""

from __future__ import annotations

import errno
import os
import socket

from gemray.channel_options import host_and_port
from gemray_cluster.check.result import CheckResult, fail, ok


def check_port(name: str, host: str, port: int) -> CheckResult:
    """Try to listen on `host`:`port` as the server will.

    Args:
        name: what the port is for, e.g. ``grpc port``.
        host: address or host name to bind.
        port: 0..65535; 0 takes a free one.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror as error:
        hint = f"; an IPv6 address is written as {host.strip('[]')}" if host.startswith("[") else ""
        return fail(name, f"{host} is no address of this host ({error.strerror}){hint}.")
    except OSError as error:
        return fail(name, f"{host_and_port(host, port)} {_reason(error, host, port)}.")
    return ok(name, f"{host_and_port(host, port)} is free." if port else f"any free port of {host}.")


def _reason(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "is taken by another process: choose another port or stop that process"
        case errno.EACCES:
            return f"may not be opened by this user: ports below 1024 need a privilege; choose one above, not {port}"
        case errno.EADDRNOTAVAIL:
            return f"cannot be opened: {host} is no address of this host; 0.0.0.0 means all of them"
        case _:
            return f"cannot be opened: {os.strerror(error.errno or 0)}"
