"""How many requests the server holds at one time, and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from gemray_cluster.gang.client import GangUnavailable
from gemray_cluster.server.errors import QueueFull
from gemray_workers.errors import InvalidField


class RequestLimiter:
    """Counts live requests against a limit. A refused request costs nothing but the refusal."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.active = 0
        """Answers that are being made: a request may have several."""
        self.completed = 0
        self.cancelled = 0
        self.failed = 0
        self.rejected = 0
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the server takes no more requests."""
        return self._closed

    @contextmanager
    def admit(self, places: int = 1) -> Iterator[None]:
        """Hold so many places while the block runs; raises QueueFull, or GangUnavailable when closed."""
        if self._closed:
            raise GangUnavailable("the server is draining: it takes no new requests")
        if self.active + places > self.limit:
            self.rejected += 1
            asked = "" if places == 1 else f", which leaves no room for {places} answers"
            raise QueueFull(
                f"the server holds {self.active} requests, its limit is {self.limit}{asked}: try again later"
            )
        self.active += places
        try:
            yield
            self.completed += 1
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        except InvalidField:
            raise
        except Exception:
            self.failed += 1
            raise
        finally:
            self.active -= places

    def close(self) -> None:
        """Take no more requests; those that are in go on."""
        self._closed = True
