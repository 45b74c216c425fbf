"""The server's messages on stderr. What cannot be written is dropped: a full disk must not end the server."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def tell(message: str) -> None:
    """Write a line, if stderr takes it: it may be a file on a full disk, or a pipe without a reader."""
    with suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)


def flush_or_forget() -> None:
    """Discard what stderr has not taken: Python would exit with 120 because of it."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
