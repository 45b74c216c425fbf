"""One gang over several cards at a time on a machine, whichever processes test there.

Collectives spin on a card until every peer has come. Ranks of two gangs that share cards keep each other's peers from
coming, until NCCL gives up.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_NAME = "gemray-cards.lock"


@contextmanager
def cards_to_itself(directory: Path | None = None) -> Iterator[None]:
    """Wait until no other gang holds the machine's cards, and hold them; a process that dies lets go.

    Args:
        directory: of the lock's file; the machine's temporary one by default.
    """
    path = (directory or Path(tempfile.gettempdir())) / LOCK_NAME
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
