"""A Hugging Face cache as `hf download` leaves it: snapshots by commit, and refs that name them."""

from __future__ import annotations

import shutil
from pathlib import Path


def add_to_cache(cache: Path, repo: str, commit: str, files: Path, *, ref: str = "main") -> Path:
    """The snapshot's directory, with a copy of `files` in it."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    shutil.copytree(files, snapshot)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    return snapshot
