"""Models in the local Hugging Face cache, by name: ORG/NAME, or ORG/NAME@REVISION. Nothing is downloaded.

The cache keeps a model in ``models--ORG--NAME/snapshots/COMMIT``, so its path tells which model it is, and another node
finds the same commit in a cache of its own, wherever that lies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[\w.-][\w./-]*))?")
_FOLDER = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")

_SIZES = ("E2B", "E4B", "12B", "26B-A4B", "31B")
PUBLISHED = (
    *(f"google/gemma-4-{size}{kind}" for size in _SIZES for kind in ("-it", "", "-it-assistant")),
    *(f"google/gemma-4-{size}-it-qat-w4a16-ct" for size in _SIZES if size != "26B-A4B"),
    "nvidia/Gemma-4-31B-IT-NVFP4",
    "RedHatAI/gemma-4-31B-it-NVFP4",
    "z-lab/gemma-4-31B-it-DFlash",
    "z-lab/gemma-4-26B-A4B-it-DFlash",
)
"""Models and drafters that misspelt names are compared with; others are served as well."""
SIMILAR = 0.85
"""Likeness of two names from which on the one may stand for the other: names of one family are alike."""


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
            f"{_hint(repo)}"
        ) from error


def _hint(repo: str) -> str:
    """The name that was probably meant, if this one is misspelt: one of the cache, or of those that are published."""
    cached = _names_in_cache()
    known = {name.lower(): name for name in (*PUBLISHED, *cached)}
    if repo in known.values():
        return ""
    near = get_close_matches(repo.lower(), known, n=1, cutoff=SIMILAR)
    if not near:
        return ""
    name = known[near[0]]
    return f"; did you mean {name}{', which is there' if name in cached else ''}?"


def _names_in_cache() -> list[str]:
    from huggingface_hub import constants

    snapshots = Path(constants.HF_HUB_CACHE).glob("models--*--*/snapshots")
    folders = (_FOLDER.fullmatch(path.parent.name) for path in snapshots)
    return sorted(f"{folder['org']}/{folder['name']}" for folder in folders if folder is not None)


def snapshot_of(path: str) -> Snapshot | None:
    """What a directory of the cache holds; None for other directories."""
    *_, folder, snapshots, commit = ("", "", "", *Path(path).parts)
    match = _FOLDER.fullmatch(folder)
    if match is None or snapshots != "snapshots":
        return None
    return Snapshot(f"{match['org']}/{match['name']}", commit)


def name_of_folder(directory: Path) -> str | None:
    """ORG/NAME of the cache's folder of a model, or of the one of its snapshots; None for other directories."""
    folder = directory.parent if directory.name == "snapshots" else directory
    match = _FOLDER.fullmatch(folder.name)
    return None if match is None or not (folder / "snapshots").is_dir() else f"{match['org']}/{match['name']}"


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
