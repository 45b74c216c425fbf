"""What a server says of itself on stderr. What cannot be written there is dropped: an account never decides a life."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def tell(message: str) -> None:
    """Write a line, if stderr takes it: it may be a file on a full disk, or a pipe that nobody reads any more."""
    with suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)


def flush_or_forget() -> None:
    """Let go of what stderr has not taken: Python would end with 120 for it."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
