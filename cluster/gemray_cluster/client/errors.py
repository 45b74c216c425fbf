"""What can go wrong when talking to a server."""

from __future__ import annotations

from gemray_workers.errors import GemrayError


class ServerUnreachable(GemrayError):
    """No server answers, or it does not serve now."""


class RequestRefused(GemrayError):
    """The server says that the request is wrong or not allowed."""


class RequestFailed(GemrayError):
    """The server took the request and could not finish it."""
