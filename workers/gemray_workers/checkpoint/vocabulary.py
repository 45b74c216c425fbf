"""What a checkpoint's files say of its vocabulary: how many rows the embedding has, and whether the head is another.

The rule is that of transformers, whose configs gemray reads: with ``tie_word_embeddings`` (the root config's; a
text_config's own is not looked at) the head is the embedding, unless both are on disk and differ, and either stands in
for the other; without it the head is what is on disk.

Shape legend: V vocabulary rows, H width.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gemray_workers.checkpoint.index import StoredTensor, file_of_tensor, opened, read_index
from gemray_workers.errors import CheckpointError

HEAD = "lm_head"
"""Where a head of its own lies, below no prefix."""
HEAD_WEIGHT = f"{HEAD}.weight"
_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class StoredVocabulary:
    """The two tables of a model that has both, or the one."""

    rows: int | None
    """Rows of the embedding; None where it cannot be told (the loader then says what is missing)."""
    has_own_head: bool
    """Whether logits come from ``lm_head.weight`` rather than the embedding."""


def stored_vocabulary(directory: str | os.PathLike[str], embedding: str, *, tied: bool) -> StoredVocabulary:
    """Look at the files of a checkpoint; one that is absent or unsound is left to the loader to report.

    Args:
        directory: a local Hugging Face directory, with or without weights.
        embedding: full name of the embedding's weight.
        tied: tie_word_embeddings of the root config.
    """
    try:
        tensors = read_index(directory).tensors
    except CheckpointError:
        return StoredVocabulary(_rows_of(directory, embedding), has_own_head=not tied)
    table, head = tensors.get(embedding), tensors.get(HEAD_WEIGHT)
    if tied and table is None:
        table = head
    differ = table is not None and head is not None and not _equal(table, head)
    return StoredVocabulary(
        rows=table.shape[0] if table is not None and table.shape else None,
        has_own_head=not tied or differ,
    )


def _rows_of(directory: str | os.PathLike[str], name: str) -> int | None:
    """Rows of one tensor where the index names its file, though something else of the checkpoint is unsound."""
    try:
        file = file_of_tensor(Path(directory), name)
        if file is None:
            return None
        with opened(file) as tensors:
            return int(tensors.get_slice(name).get_shape()[0])
    except CheckpointError:
        return None


def _equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tables hold the same numbers; reads up to the first block of rows that differ."""
    if first.shape != second.shape or len(first.shape) != 2:
        return False
    try:
        with safe_open(first.file, framework="pt") as a, safe_open(second.file, framework="pt") as b:
            first_VH, second_VH = a.get_slice(first.name), b.get_slice(second.name)
            blocks = (slice(start, start + _BLOCK_ROWS) for start in range(0, first.shape[0], _BLOCK_ROWS))
            return all(torch.equal(first_VH[block].double(), second_VH[block].double()) for block in blocks)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{first.file.name} or {second.file.name} could not be read: {error}") from error
