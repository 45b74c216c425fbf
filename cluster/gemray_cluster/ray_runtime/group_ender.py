"""Ends process groups once this process has ended, however it did."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable


class GroupEnder:
    """A shell that waits at a pipe whose other end only this process has, and then kills groups of processes.

    For groups that do not notice at once by themselves. It has a session of its own, so that what ends this process by
    a signal to its group does not end it.
    """

    def __init__(self, groups: Iterable[int]) -> None:
        """Begin to wait. `groups`: ids of process groups whose leaders live."""
        targets = " ".join(f"-{group}" for group in sorted(groups))
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", f"read -r end; kill -s KILL -- {targets}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def let_go(self) -> None:
        """Wait no more: the groups have ended, and their ids may be given to others. Idempotent."""
        self._shell.kill()
        self._shell.wait()
        if self._shell.stdin is not None:
            self._shell.stdin.close()
