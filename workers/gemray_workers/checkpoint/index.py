"""Which tensors a checkpoint directory holds, and in which file: read from safetensors headers, never from data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gemray_workers.checkpoint.json_file import is_broken_link, refuse_broken_link
from gemray_workers.checkpoint.lfs import refuse_lfs_pointer
from gemray_workers.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MOST_LISTED = 20


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on disk, as its file's header describes it."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it: BF16, F32, I64, ..."""


@dataclass(frozen=True)
class CheckpointIndex:
    """Every tensor of a checkpoint directory."""

    directory: Path
    tensors: Mapping[str, StoredTensor]
    """By full name; file by file, and within a file in the order of the data, so that reading runs forward."""


def read_index(path: str | os.PathLike[str]) -> CheckpointIndex:
    """List the tensors of a Hugging Face directory: ``model.safetensors``, or an index and the shards it names.

    Raises:
        CheckpointError: no such directory, no safetensors in it, an unreadable index, a shard that is absent, truncated
            or corrupt, a tensor in two files, or an index that disagrees with its shards. Lists all that is wrong.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; a checkpoint must be a local Hugging Face directory")
    refuse_broken_link(directory / INDEX_FILE)
    if not (directory / INDEX_FILE).is_file():
        refuse_broken_link(directory / SINGLE_FILE)
        if not (directory / SINGLE_FILE).is_file():
            raise CheckpointError(_why_no_checkpoint(directory))
        return _merged(directory, [SINGLE_FILE], weight_map=None)
    weight_map = _read_weight_map(directory / INDEX_FILE)
    shards = sorted(set(weight_map.values()))
    if (directory / SINGLE_FILE).is_file() and SINGLE_FILE not in shards:
        raise CheckpointError(f"{directory} holds both {SINGLE_FILE} and {INDEX_FILE}: remove the one that is stale")
    return _merged(directory, shards, weight_map)


def index_shards(directory: Path) -> list[str]:
    """The files that the index names, sorted; raises CheckpointError for an unreadable index."""
    return sorted(set(_read_weight_map(directory / INDEX_FILE).values()))


def file_of_tensor(directory: Path, name: str) -> Path | None:
    """The file that holds a tensor, going by the index where there is one; None where none is said to.

    Raises:
        CheckpointError: an unreadable index.
    """
    if (directory / INDEX_FILE).is_file():
        shard = _read_weight_map(directory / INDEX_FILE).get(name)
        return None if shard is None else directory / shard
    return directory / SINGLE_FILE if (directory / SINGLE_FILE).is_file() else None


def listed(names: Iterable[str]) -> str:
    """Names for an error message, sorted; a long list is cut and counted."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _MOST_LISTED} more" if len(ordered) > _MOST_LISTED else ""
    return ", ".join(ordered[:_MOST_LISTED]) + more


def _merged(directory: Path, shards: list[str], weight_map: Mapping[str, str] | None) -> CheckpointIndex:
    problems: list[str] = []
    absent = [shard for shard in shards if not (directory / shard).is_file()]
    if absent:
        named = [f"{shard} (a link to nowhere)" if is_broken_link(directory / shard) else shard for shard in absent]
        problems.append(f"shards that the index names are missing: {listed(named)}")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        if shard in absent:
            continue
        try:
            stored = _read_header(directory / shard)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        problems += [
            f"{tensor.name} is in two files: {tensors[tensor.name].file.name} and {shard}"
            for tensor in stored
            if tensor.name in tensors
        ]
        if weight_map is not None:
            problems += _disagreements(shard, {tensor.name for tensor in stored}, weight_map)
        tensors |= {tensor.name: tensor for tensor in stored}
    if problems:
        raise CheckpointError(f"{directory} is not a sound checkpoint:\n  " + "\n  ".join(problems))
    return CheckpointIndex(directory, tensors)


def _disagreements(shard: str, held: set[str], weight_map: Mapping[str, str]) -> list[str]:
    promised = {name for name, file in weight_map.items() if file == shard}
    problems = []
    if promised - held:
        problems.append(f"the index promises tensors that {shard} does not hold: {listed(promised - held)}")
    if held - weight_map.keys():
        problems.append(f"{shard} holds tensors that the index does not name: {listed(held - weight_map.keys())}")
    return problems


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file to read tensors from; raises CheckpointError where it can't be."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file.name} could not be read: {error}") from error


def _read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one file in the order of their data. safetensors checks that the data is all there."""
    try:
        # torch's mapping counts as memory, which a machine that only looks at headers may not have.
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.offset_keys()}
            return [
                StoredTensor(name, file, tuple(entry.get_shape()), entry.get_dtype()) for name, entry in slices.items()
            ]
    except (SafetensorError, OSError) as error:
        refuse_lfs_pointer(file)
        raise CheckpointError(f"{file.name} is truncated or corrupt ({file.stat().st_size} bytes): {error}") from error


def _read_weight_map(file: Path) -> dict[str, str]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} has no weight_map of tensor names to file names")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{file}: weight_map puts {name} in {shard!r}, but shards are .safetensors files of this directory"
            )
    return weight_map


def _why_no_checkpoint(directory: Path) -> str:
    names = {entry.name for entry in directory.iterdir()}
    shards = {name for name in names if name.endswith(".safetensors")}
    pickles = {name for name in names if name.endswith((".bin", ".pt", ".pth"))}
    missing = f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}"
    if shards:
        return f"{missing}, though it holds {listed(shards)}: the index is missing"
    if pickles:
        return f"{missing}, only PyTorch pickles ({listed(pickles)}): convert them to safetensors"
    return f"{missing} (it holds: {listed(names) or 'nothing'})"
