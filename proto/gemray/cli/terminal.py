"""The terminal that controls a process, if one does."""

from __future__ import annotations

import os


def has_terminal() -> bool:
    """Whether a terminal controls this process: its end is then what SIGHUP tells of."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
