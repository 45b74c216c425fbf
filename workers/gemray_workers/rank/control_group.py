"""Memory limits of containers and services: Linux's control groups, of either version."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60
"""Version 1 has a number for it, the largest whole number of pages."""


@dataclass(frozen=True)
class _Version:
    """Where a version of control groups keeps the numbers of memory."""

    root: str
    """The groups' directory below `CGROUP`."""
    limit: str
    used: str
    files: tuple[str, str]
    """What a group has read of files, in its memory.stat."""


_V1 = _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Version("", "memory.max", "memory.current", ("inactive_file", "active_file"))


def left_of_control_groups() -> int:
    """Bytes below the limit of a container or service."""
    return min((left for _, left in control_groups()), default=UNLIMITED)


def control_groups() -> Iterator[tuple[int, int]]:
    """(limit, what is left) of the process's control group and each around it, where there is a limit. Files that a
    group has read count as left, as the kernel drops them.
    """
    version, path = _own_group()
    root = CGROUP / version.root
    own = root / path.lstrip("/")
    for group in (own, *own.parents):
        if group.is_relative_to(root):
            yield from _limit_of(group, version)


def _own_group() -> tuple[_Version, str]:
    """The version that counts memory here, and the process's group."""
    try:
        lines = [line.split(":", 2) for line in OWN_CGROUP.read_text().splitlines()]
    except OSError:
        lines = []
    paths = {controllers: path for _, controllers, path in lines}
    for controllers, path in paths.items():
        if "memory" in controllers.split(","):
            return _V1, path
    return _V2, paths.get("", "")


def _limit_of(group: Path, version: _Version) -> Iterator[tuple[int, int]]:
    try:
        limit = (group / version.limit).read_text().strip()
        used = int((group / version.used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return
    files = sum(int(stat.get(name, 0)) for name in version.files)
    if limit != "max" and int(limit) < UNLIMITED:
        yield int(limit), max(0, int(limit) - used + files)
