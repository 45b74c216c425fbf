"""Streams a checkpoint into one rank's memory, reading only what the rank keeps.

The model says what goes where (`WeightTarget`); names, shapes and dtypes are checked against the files' headers
before a byte of data is copied, so a bad checkpoint fails at once and with everything that is wrong with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemray_workers.checkpoint.damage import refuse_damaged_codes, refuse_damaged_scale, refuse_damaged_weights
from gemray_workers.checkpoint.index import CheckpointIndex, StoredTensor, listed, opened, read_index
from gemray_workers.checkpoint.target import Copy, WeightTarget, settle
from gemray_workers.errors import CheckpointError

ProgressFn = Callable[[int, int], None]
"""Called with (bytes read so far, bytes this rank reads in all)."""

BLOCK_BYTES = 64 << 20
"""Most bytes on disk that one copy moves, so that no large tensor is held a second time on its way."""

CHECKED_SCALE_BYTES = 256 << 20
"""Most bytes of scales that a check reads, the smallest tensors first: all of them but where groups are small and the
model is large."""

MOST_PROBLEMS = 12
"""That one message lists."""

STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
_CODES_ALONE = (torch.int8, torch.uint8, torch.float8_e4m3fn)
"""Dtypes whose numbers mean nothing without a scale."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did."""

    tensors: int
    """Tensors of the checkpoint that the model asked for."""
    bytes_read: int
    """Bytes on disk of the blocks that this rank copied."""
    seconds: float
    settling_s: float
    """What followed once all was filled, in which packed weights were laid out; part of `seconds`."""
    ignored: tuple[str, ...]
    """Full names of tensors left unread because `is_ignored` knows them, sorted."""


@dataclass(frozen=True)
class _WeightLoad:
    """A target and where it is stored: everything checked, ready to copy."""

    target: WeightTarget
    stored: StoredTensor

    @property
    def bytes_to_read(self) -> int:
        width = STORED_DTYPES[self.stored.dtype].itemsize if self.target.copies else 0
        if self.target.role == "scale":
            return width * prod(self.stored.shape)
        return sum(width * copy.destination.numel() for copy in self.target.copies)


def load_weights(
    directory: str | os.PathLike[str],
    targets: Iterable[WeightTarget],
    *,
    prefix: str,
    is_ignored: Callable[[str], bool],
    progress: ProgressFn | None = None,
) -> LoadReport:
    """Copy a checkpoint into the targets' destinations, cast to their dtypes.

    Args:
        directory: a local Hugging Face directory with sharded or single safetensors.
        targets: every tensor the model needs, on all ranks alike; copies may be empty on this rank.
        prefix: what stands before the targets' names on disk, e.g. ``model.language_model.``.
        is_ignored: whether a tensor that no target names may be left unread; given its full name.
        progress: called after each block.

    Raises:
        CheckpointError: an unsound checkpoint (see `read_index`), or one that does not fit the targets: missing or
            unexpected tensors, wrong shapes or dtypes, a tensor targeted twice. Nothing has been copied then. Also for
            a file that cannot be read to its end, when some tensors have been copied.
    """
    started = time.monotonic()
    index, wanted = read_index(directory), list(targets)
    loads, ignored = _matched(index, wanted, prefix, is_ignored)
    total = sum(load.bytes_to_read for load in loads)
    done = 0
    for file, loads_of_file in groupby(loads, key=lambda load: load.stored.file):
        for copied in _copy_file(file, loads_of_file):
            done += copied
            if progress is not None:
                progress(done, total)
    settling_s = settle(wanted)
    return LoadReport(len(loads), done, time.monotonic() - started, settling_s, tuple(sorted(ignored)))


def check_weights(
    directory: str | os.PathLike[str],
    targets: Iterable[WeightTarget],
    *,
    prefix: str,
    is_ignored: Callable[[str], bool],
    scale_bytes: int = CHECKED_SCALE_BYTES,
) -> None:
    """What `load_weights` would find wrong before it copies, from the files' headers, and in the scales of packed
    weights, as far as reading them is quick; destinations may be on meta.

    Args:
        directory: as of `load_weights`.
        targets: as of `load_weights`.
        prefix: as of `load_weights`.
        is_ignored: as of `load_weights`.
        scale_bytes: how much of the scales to read; 0 for the headers alone.

    Raises:
        CheckpointError: as `load_weights` does.
    """
    loads, _ = _matched(read_index(directory), list(targets), prefix, is_ignored)
    scales = sorted((load for load in loads if load.target.role == "scale"), key=lambda load: prod(load.stored.shape))
    sizes = accumulate(STORED_DTYPES[load.stored.dtype].itemsize * prod(load.stored.shape) for load in scales)
    quick = {load.stored.name for load, size in zip(scales, sizes, strict=True) if size <= scale_bytes}
    for file, loads_of_file in groupby(loads, key=lambda load: load.stored.file):
        if names := [load.stored.name for load in loads_of_file if load.stored.name in quick]:
            with opened(file) as tensors:
                for name in names:
                    refuse_damaged_scale(name, tensors.get_tensor(name))


def _matched(
    index: CheckpointIndex, targets: Sequence[WeightTarget], prefix: str, is_ignored: Callable[[str], bool]
) -> tuple[list[_WeightLoad], set[str]]:
    """Pair targets with stored tensors, in the order of the files; or raise with all that does not fit."""
    by_name = {_name_on_disk(target, index, prefix): target for target in targets}
    left_over = index.tensors.keys() - by_name.keys()
    ignored = {name for name in left_over if is_ignored(name)}
    # In the order of the data on disk, whatever the order of the targets.
    loads = [_WeightLoad(by_name[name], stored) for name, stored in index.tensors.items() if name in by_name]

    problems = [*_plain_after_all(by_name, index), *(problem for load in loads for problem in _misfits(load))]
    if missing := by_name.keys() - index.tensors.keys():
        problems.append(f"missing tensors: {listed(missing)}")
    if unexpected := left_over - ignored:
        problems.append(f"unexpected tensors: {listed(unexpected)}")
    if len(by_name) < len(targets):
        names = [_name_on_disk(target, index, prefix) for target in targets]
        problems.append(f"tensors targeted twice: {listed({name for name in names if names.count(name) > 1})}")
    if len(problems) > MOST_PROBLEMS:
        problems[MOST_PROBLEMS:] = [f"and {len(problems) - MOST_PROBLEMS} more"]
    if problems:
        raise CheckpointError(f"{index.directory} does not fit the model:\n  " + "\n  ".join(problems))
    return loads, ignored


def _plain_after_all(by_name: Mapping[str, WeightTarget], index: CheckpointIndex) -> Iterator[str]:
    """What explains the problems that follow where a config tells of packed weights that are none, as one that was
    copied from another checkpoint or left behind by a merge."""
    codes = {name: target for name, target in by_name.items() if target.role == "codes"}
    on_disk = {name: index.tensors.get(f"{name.rpartition('.')[0]}.weight") for name in codes}
    plain = {name: stored for name, stored in on_disk.items() if stored is not None and stored.dtype in _PLAIN_DTYPES}
    if plain:
        name, stored = next(iter(plain.items()))
        yield (
            f"{len(plain)} of {len(codes)} layers that the quantization config says are packed are plain: "
            f"{stored.name} is stored as {stored.dtype}, not as {codes[name].format}; remove that config, or list them "
            "as ignored in it"
        )


def _name_on_disk(target: WeightTarget, index: CheckpointIndex, prefix: str) -> str:
    name = target.full_name(prefix)
    is_missing = name not in index.tensors and target.stand_in in index.tensors
    return target.stand_in if is_missing and target.stand_in is not None else name


def _misfits(load: _WeightLoad) -> Iterator[str]:
    stored, target = load.stored, load.target
    if not _is_shaped(stored, target):
        of_format = f" of {target.format}" if target.format else ""
        yield f"{stored.name} has shape {list(stored.shape)}, the model needs {list(target.shape)}{of_format}"
        return
    if not target.copies:
        return
    dtype = STORED_DTYPES.get(stored.dtype)
    if dtype is None:
        yield f"{stored.name} is stored as {stored.dtype}; allowed: {', '.join(STORED_DTYPES)}"
        return
    allowed = _allowed_dtypes(target)
    if dtype not in allowed:
        names = [name for name, of_name in STORED_DTYPES.items() if of_name in allowed]
        yield f"{stored.name} is stored as {stored.dtype}; allowed: {', '.join(names)}"
        return
    for copy in target.copies:
        if copy.destination.is_floating_point() != dtype.is_floating_point:
            yield f"{stored.name} is stored as {stored.dtype}, the model keeps it as {copy.destination.dtype}"
        # `copy_` would broadcast a wrong block without a word.
        block = _block_shape(copy.source, target.shape)
        if block != tuple(copy.destination.shape) and not (copy.spread and block is not None):
            yield (
                f"{stored.name}: block {_spelled(copy.source)} of shape {list(stored.shape)} does not fill a "
                f"destination of shape {list(copy.destination.shape)}"
            )


def _is_shaped(stored: StoredTensor, target: WeightTarget) -> bool:
    if target.role != "scale":
        return stored.shape == target.shape
    # Dimensions of 1 come and go ([], [1] and [1, 1] are all in use); the order of the others is that of the numbers.
    return [n for n in stored.shape if n != 1] == [n for n in target.shape if n != 1]


def _allowed_dtypes(target: WeightTarget) -> set[torch.dtype]:
    """Stored dtypes that say what the target's memory then says."""
    if target.role == "codes":
        return {copy.destination.dtype for copy in target.copies}
    if target.role == "weight":
        return set(STORED_DTYPES.values()).difference(_CODES_ALONE)
    return {dtype for dtype in STORED_DTYPES.values() if dtype.is_floating_point}


def _block_shape(source: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape of the block, or None if it is not inside the tensor."""
    if len(source) != len(shape):
        return None
    if not all(0 <= part.start <= part.stop <= size for part, size in zip(source, shape, strict=True)):
        return None
    return tuple(part.stop - part.start for part in source)


def _spelled(source: tuple[slice, ...]) -> str:
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in source) + "]"


@torch.no_grad()
def _copy_file(file: Path, loads: Iterable[_WeightLoad]) -> Iterator[int]:
    """Copy a file's tensors; yields the bytes of each block copied."""
    with opened(file) as tensors:
        for load in loads:
            if load.target.role == "scale":
                scale = tensors.get_tensor(load.stored.name)
                refuse_damaged_scale(load.stored.name, scale)
                for copy in load.target.copies:
                    copy.destination.copy_(scale.view(load.target.shape)[copy.source])
                yield load.bytes_to_read
                continue
            on_disk = tensors.get_slice(load.stored.name)
            for copy in load.target.copies:
                for block, size in _copy_blocks(on_disk, copy, STORED_DTYPES[load.stored.dtype].itemsize):
                    refuse_damaged = refuse_damaged_codes if load.target.role == "codes" else refuse_damaged_weights
                    refuse_damaged(load.stored.name, block)
                    yield size


def _copy_blocks(on_disk: Any, copy: Copy, itemsize: int) -> Iterator[tuple[Tensor, int]]:
    """Copy in blocks of whole rows; yields each with its bytes on disk.

    Slices of a safetensors file are views of the mapped file, not copies.
    """
    if not copy.source:
        copy.destination.copy_(on_disk[...])
        yield copy.destination, itemsize
        return
    rows, *columns = copy.source
    row_bytes = itemsize * prod(copy.destination.shape[1:])
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        block = copy.destination[start - rows.start : stop - rows.start]
        block.copy_(on_disk[(slice(start, stop), *columns)])
        yield block, row_bytes * (stop - start)
