"""Files whose content may be replaced while the server runs: certificates and tokens are rotated without a restart."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from gemray_workers.errors import InvalidField

logger = logging.getLogger(__name__)

T = TypeVar("T")
Stamps = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles(Generic[T]):
    """What some files hold, read again when one of them has changed. Threads may share it."""

    def __init__(self, paths: Sequence[str], read: Callable[[], T]) -> None:
        """Read them; raises what `read` raises.

        Args:
            paths: files that `read` reads.
            read: raises InvalidField for content that cannot be used.
        """
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        self._stamps = self._look()
        self._content = read()

    def latest(self) -> T:
        """What they hold now. Content that cannot be used is told in the log, and the last that could be stays."""
        with self._lock:
            stamps = self._look()
            if stamps != self._stamps:
                self._stamps = stamps
                try:
                    self._content = self._read()
                    logger.info("read again, as it has changed: %s", ", ".join(self._paths))
                except InvalidField as error:  # half written, perhaps: what follows changes the stamps again
                    logger.warning("%s; what was read before stays in use", error)
            return self._content

    def _look(self) -> Stamps:
        """What tells contents apart; a link counts as what it leads to, as Kubernetes swaps links."""
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
