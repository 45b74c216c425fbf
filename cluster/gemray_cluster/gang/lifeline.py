"""The coordinator's end of the connections that end ranks with it; the ranks' end is `gemray_workers.rank.lifeline`."""

from __future__ import annotations

import socket

_SPARE = 16
"""Room for those who connect by mistake: nothing is sent to them."""


class Lifeline:
    """A socket to which each rank of a gang connects. With `close`, or with this process, the connections end.

    They are never accepted: the kernel keeps them, and nothing is to be sent.
    """

    def __init__(self, host: str, num_ranks: int) -> None:
        """Listen at a free port of `host`."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=num_ranks + _SPARE)
        self.host = host
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """End every connection, and what holds one. Idempotent."""
        self._socket.close()
