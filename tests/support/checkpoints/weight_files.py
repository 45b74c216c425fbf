"""Checkpoints of a few random tensors, and loading them, for tests of the loader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gemray_workers.checkpoint.index import INDEX_FILE, SINGLE_FILE
from gemray_workers.checkpoint.loader import LoadReport, ProgressFn, load_weights
from gemray_workers.checkpoint.target import Copy, WeightTarget
from gemray_workers.errors import CheckpointError

PREFIX = "model.language_model."
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def random_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def write_single(directory: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, directory / SINGLE_FILE)


def write_shards(directory: Path, shards: dict[str, dict[str, Tensor]]) -> None:
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    write_weight_map(directory, {name: file for file, tensors in shards.items() for name in tensors})


def write_weight_map(directory: Path, weight_map: object) -> None:
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def whole(name: str, destination: Tensor) -> WeightTarget:
    shape = tuple(destination.shape)
    return WeightTarget(name, shape, (Copy(tuple(slice(0, size) for size in shape), destination),))


def refuse_all(name: str) -> bool:
    return False


def load(
    directory: Path,
    targets: list[WeightTarget],
    is_ignored: Callable[[str], bool] = refuse_all,
    progress: ProgressFn | None = None,
) -> LoadReport:
    return load_weights(directory, targets, prefix=PREFIX, is_ignored=is_ignored, progress=progress)


def refusal(directory: Path, targets: list[WeightTarget], is_ignored: Callable[[str], bool] = refuse_all) -> str:
    """The error's message; asserts that no destination was touched."""
    destinations = [copy.destination for target in targets for copy in target.copies]
    before = [destination.clone() for destination in destinations]
    with pytest.raises(CheckpointError) as error:
        load(directory, targets, is_ignored)
    assert all(torch.equal(d, b) for d, b in zip(destinations, before, strict=True))
    return str(error.value)
