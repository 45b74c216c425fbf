"""Log lines beside a bar that moves."""

from __future__ import annotations

import sys


class PresentStderr:
    """Writes to what `sys.stderr` is now: a bar puts a stream in its place that keeps lines apart from the bar."""

    def write(self, text: str) -> None:
        """Write to it."""
        sys.stderr.write(text)

    def flush(self) -> None:
        """Flush it."""
        sys.stderr.flush()
