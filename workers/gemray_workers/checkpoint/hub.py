"""Models in the local Hugging Face cache, by name: ORG/NAME, or ORG/NAME@REVISION. Nothing is downloaded.

The cache keeps a model in ``models--ORG--NAME/snapshots/COMMIT``, so its path tells which model it is, and another node
finds the same commit in a cache of its own, wherever that lies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[\w.-][\w./-]*))?")
_FOLDER = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")


class NotInCache(LookupError):
    """A model is neither a directory here nor in the cache; the message is what would be allowed."""


@dataclass(frozen=True)
class Snapshot:
    """A model as the cache holds it."""

    repo: str
    """ORG/NAME."""
    commit: str

    @property
    def download(self) -> str:
        """The command that brings it into a node's cache."""
        return f"hf download {self.repo} --revision {self.commit}"


def is_hub_name(text: str) -> bool:
    """Whether a text could name a model of the hub, and names nothing on this disk."""
    return _NAME.fullmatch(text) is not None and not Path(text).exists()


def find_in_cache(name: str) -> str:
    """The directory of ORG/NAME or ORG/NAME@REVISION (a branch, a tag or a commit; main unless told).

    Raises:
        NotInCache: it is not there; the message tells how to download it.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    match = _NAME.fullmatch(name)
    if match is None:
        raise NotInCache("ORG/NAME or ORG/NAME@REVISION")
    repo, revision = match["repo"], match["revision"]
    try:
        return str(snapshot_download(repo, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        at_revision = "" if revision is None else f" --revision {revision}"
        raise NotInCache(
            f"a directory, or a model in the Hugging Face cache ({constants.HF_HUB_CACHE}), into which "
            f"`hf download {repo}{at_revision}` brings it (after `hf auth login` where a model asks for consent)"
        ) from error


def snapshot_of(path: str) -> Snapshot | None:
    """What a directory of the cache holds; None for other directories."""
    *_, folder, snapshots, commit = ("", "", "", *Path(path).parts)
    match = _FOLDER.fullmatch(folder)
    if match is None or snapshots != "snapshots":
        return None
    return Snapshot(f"{match['org']}/{match['name']}", commit)


def on_this_node(path: str) -> str:
    """The directory on this node that holds what `path` holds on the coordinator's.

    It is `path` itself, or, where that is a snapshot of a cache that is not here, the same commit in this node's cache.
    """
    snapshot = snapshot_of(path)
    if snapshot is None or Path(path).is_dir():
        return path
    try:
        return find_in_cache(f"{snapshot.repo}@{snapshot.commit}")
    except NotInCache:
        return path  # whoever reads it says that it is not there
