"""Pointers of Git LFS: what a clone has in place of large files that have not been fetched."""

from __future__ import annotations

from pathlib import Path

from gemray_workers.errors import CheckpointError

_BEGINNING = b"version https://git-lfs.github.com/spec/"
_MOST_BYTES = 1024
"""Size that the specification of Git LFS allows a pointer."""


def is_lfs_pointer(file: Path) -> bool:
    """Whether a file that can be read is a pointer to the one that it should be."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            return False
        with file.open("rb") as stream:
            return stream.read(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return False


def refuse_lfs_pointer(file: Path) -> None:
    """Raise CheckpointError for a pointer, which would pass for a damaged file."""
    if is_lfs_pointer(file):
        raise CheckpointError(
            f"{file} is a pointer of Git LFS, not the file: `git lfs pull` in {file.parent} brings it"
        )
