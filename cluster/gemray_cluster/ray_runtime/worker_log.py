"""What a dead worker's own log says last: Ray says only that a process died, its log says why."""

from __future__ import annotations

from pathlib import Path

_MARKS = ("Error", "error:", "Fatal", "fatal", "Too many open files", "Check failed", "terminate called", "Killed")
_TAIL_BYTES = 64 << 10
_MOST_CHARACTERS = 300


def last_words(logs: Path, pid: int) -> str | None:
    """The last line that names an error in the logs of process `pid`, or None: no such log here, or no such line.

    Args:
        logs: the directory of a Ray session's logs on this machine.
        pid: of the worker.
    """
    files = [*logs.glob(f"worker-*-{pid}.err"), *logs.glob(f"python-core-worker-*_{pid}.log")]
    for file in files:
        for line in reversed(_tail(file)):
            if any(mark in line for mark in _MARKS):
                return line.strip()[-_MOST_CHARACTERS:]
    return None


def _tail(file: Path) -> list[str]:
    try:
        with file.open("rb") as content:
            content.seek(max(0, file.stat().st_size - _TAIL_BYTES))
            return content.read().decode(errors="replace").splitlines()
    except OSError:
        return []
