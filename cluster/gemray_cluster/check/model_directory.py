"""Is the model there, on every node that will load it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gemray_cluster.check.result import CheckResult, fail, ok
from gemray_workers.checkpoint.drafter_marks import refuse_drafter
from gemray_workers.checkpoint.hub import name_of_folder, snapshot_of
from gemray_workers.checkpoint.index import INDEX_FILE, SINGLE_FILE, index_shards
from gemray_workers.checkpoint.json_file import is_broken_link, read_json_object
from gemray_workers.checkpoint.lfs import is_lfs_pointer
from gemray_workers.errors import CheckpointError, GemrayError

NAME = "model"


@dataclass(frozen=True)
class Checkpoints:
    """What every node with a rank must have, at the same paths."""

    model: str
    drafters: tuple[str, ...]
    weights: bool = True
    """False if weights are made up rather than read."""


def check_model_directory(path: str, *, node: str | None, weights: bool = True, tokenizer: bool = True) -> CheckResult:
    """Look for a Hugging Face directory, of a model or a drafter, at `path` of this host.

    Args:
        path: what --model or --drafter names.
        node: this host's name in the sentence; None for "this machine".
        weights: False where only the tokenizer and the configuration are read.
        tokenizer: False for a drafter, which uses its target's.
    """
    directory, place = Path(path), "this machine" if node is None else f"node {node}"
    if not directory.is_dir():
        what = "model" if tokenizer else "drafter"
        return fail(
            NAME,
            f"no directory {path} on {place}: every node that runs a rank needs the {what} {_where(path)}.",
        )
    try:
        if tokenizer:
            _refuse_drafter(directory)
        missing = missing_files(directory, weights=weights, tokenizer=tokenizer)
    except GemrayError as error:
        return fail(NAME, f"on {place}: {error}.")
    if missing:
        missing = [f"{name}{_what_is_there(directory / name)}" for name in missing]
        names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        if other := next(iter(sorted(file.name for file in directory.glob("*.gguf"))), None):
            return fail(NAME, f"{path} on {place} lacks {names}: GGUF ({other}) is not read, safetensors are.")
        snapshot = snapshot_of(path)
        remedy = "" if snapshot is None else f"; `{snapshot.download}` brings the rest"
        if any(is_lfs_pointer(file) for file in directory.iterdir()):
            remedy = f"; `git lfs pull` in {path} brings the rest"
        if (repo := name_of_folder(directory)) is not None:
            return fail(NAME, f"{path} on {place} is the cache's folder of {repo}: --model takes it by that name.")
        return fail(NAME, f"{path} on {place} lacks {names}: the copy is not complete{remedy}.")
    return ok(NAME, f"{path} on {place} is complete.")


def _refuse_drafter(directory: Path) -> None:
    """A drafter ships no tokenizer: what it is says more than what it lacks. Raises InvalidField."""
    try:
        config = read_json_object(directory / "config.json")
    except CheckpointError:
        return  # whoever reads it for a model says so
    refuse_drafter(directory, config)


def _is_there(file: Path) -> bool:
    return file.is_file() and not is_lfs_pointer(file)


def _what_is_there(file: Path) -> str:
    """What stands in a missing file's place, in words behind its name."""
    if is_broken_link(file):
        return " (a link to nowhere)"
    return " (a pointer of Git LFS)" if is_lfs_pointer(file) else ""


def _where(path: str) -> str:
    snapshot = snapshot_of(path)
    if snapshot is None:
        return "at the same path (a shared volume, or a copy on each)"
    return f"in its Hugging Face cache, or at the same path: run `{snapshot.download}` there"


def missing_files(directory: Path, *, weights: bool, tokenizer: bool) -> list[str]:
    """Names of the files that a checkpoint at `directory` should have and has not.

    Raises:
        CheckpointError: an unreadable index.
    """
    wanted = ["config.json", *(["tokenizer.json"] if tokenizer else [])]
    missing = [name for name in wanted if not _is_there(directory / name)]
    if not weights:
        return missing
    if (directory / INDEX_FILE).is_file():
        return missing + [shard for shard in index_shards(directory) if not _is_there(directory / shard)]
    if not _is_there(directory / SINGLE_FILE):
        is_pointer = is_lfs_pointer(directory / SINGLE_FILE)
        missing.append(SINGLE_FILE if is_pointer else f"{SINGLE_FILE} (or {INDEX_FILE})")
    return missing
