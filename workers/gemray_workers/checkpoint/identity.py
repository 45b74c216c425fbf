"""Which checkpoint is served: its name, its revision, and a hash that is cheap to compute."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gemray_workers.checkpoint.hf_config import fingerprint
from gemray_workers.checkpoint.hub import snapshot_of
from gemray_workers.checkpoint.index import SINGLE_FILE, read_index
from gemray_workers.checkpoint.json_file import read_json_object
from gemray_workers.errors import CheckpointError

SAMPLED_BYTES = 64
"""Bytes of each tensor that the hash covers: 32 numbers of bfloat16, which no training leaves as they were."""
_LENGTH_BYTES = 8
_WRITTEN_BY = "transformers_version"
"""What wrote config.json last, a program that shards anew for one: no number of the model depends on it."""


class CheckpointIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoint a directory holds."""

    name: str
    """ORG/NAME in the Hugging Face cache, else the directory's name."""
    revision: str = ""
    """The commit of a model in the Hugging Face cache; empty for other directories."""
    hash: str = ""
    """As `checkpoint_hash` makes it; empty for random weights."""

    @classmethod
    def of_directory(cls, path: str, *, has_weights: bool = True) -> CheckpointIdentity:
        """Identify a Hugging Face directory; raises CheckpointError.

        `has_weights` is False where the weights are made up rather than read: there is nothing to hash then.
        """
        snapshot = snapshot_of(path)
        return cls(
            name=checkpoint_name(path),
            revision="" if snapshot is None else snapshot.commit,
            hash=checkpoint_hash(path) if has_weights and holds_weights(path) else "",
        )


def checkpoint_name(path: str) -> str:
    """What a checkpoint is called: ORG/NAME in the Hugging Face cache, else its directory's name."""
    snapshot = snapshot_of(path)
    return Path(path).resolve().name if snapshot is None else snapshot.repo


def holds_weights(path: str) -> bool:
    """Whether a directory holds weights: a coordinator may have configs and tokenizer alone."""
    return (Path(path) / SINGLE_FILE).exists() or any(Path(path).glob("*.safetensors"))


def checkpoint_hash(path: str) -> str:
    """SHA-256 over config.json (as data) and, by name, dtype, shape and first bytes of each tensor.

    It takes milliseconds where the weights take minutes, and differs between checkpoints that differ in a config, in
    names, shapes or dtypes, or by training; files that are cut or named otherwise hold the same one. It does not find
    damage further inside a tensor. Raises CheckpointError.
    """
    config = read_json_object(Path(path) / "config.json")
    config.pop(_WRITTEN_BY, None)
    digest = hashlib.sha256(fingerprint(config).encode())
    described: dict[str, bytes] = {}
    for file in sorted({tensor.file for tensor in read_index(path).tensors.values()}):
        try:
            described |= _described(file)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    for name in sorted(described):
        digest.update(described[name])
    return digest.hexdigest()


def _described(file: Path) -> Iterator[tuple[str, bytes]]:
    """What is hashed of each tensor of a safetensors file, by name; read in the order of the data."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(_LENGTH_BYTES), "little")))
        start = stream.tell()
        tensors = [(entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__"]
        for (begin, end), name in sorted(tensors):
            stream.seek(start + begin)
            first = stream.read(min(SAMPLED_BYTES, end - begin))
            yield name, json.dumps([name, header[name]["dtype"], header[name]["shape"]]).encode() + first
