"""Which checkpoint a directory holds: the hash differs where answers could, and nowhere else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gemray_workers.checkpoint.identity import CheckpointIdentity, checkpoint_hash
from gemray_workers.embedded import embedded_path
from gemray_workers.errors import CheckpointError
from support.checkpoints.hub_cache import add_to_cache


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "m", "layers": 2}')
    save_file({"a": torch.ones(8, 64), "b": torch.zeros(100)}, tmp_path / "m" / "model.safetensors")
    return tmp_path / "m"


def _train(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "b": tensors["b"] + 1e-6}, model / "model.safetensors")


def _reshape(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "a": tensors["a"].reshape(64, 8)}, model / "model.safetensors")


def _rename(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({"c": tensors["a"], "b": tensors["b"]}, model / "model.safetensors")


def _configure(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "m", "layers": 3}')


@pytest.mark.parametrize("change", [_train, _reshape, _rename, _configure])
def test_another_checkpoint_has_another_hash(model: Path, change: Callable[[Path], None]) -> None:
    before = checkpoint_hash(str(model))
    change(model)
    after = checkpoint_hash(str(model))
    assert before != after
    assert len(before) == len(after) == 64


def test_a_copy_has_the_same_hash_however_its_config_is_spaced(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / "config.json").write_text(json.dumps({"layers": 2, "model_type": "m"}, indent=4))
    assert checkpoint_hash(str(copy)) == checkpoint_hash(str(model))


def test_a_copy_in_other_files_has_the_same_hash(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    copy = tmp_path / "sharded"
    copy.mkdir()
    (copy / "config.json").write_text('{"model_type": "m", "layers": 2, "transformers_version": "5.0"}')
    files = {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}
    for name, file in files.items():
        save_file({name: tensors[name]}, copy / file, metadata={"format": "pt"})
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert checkpoint_hash(str(copy)) == checkpoint_hash(str(model))
    save_file({"a": tensors["a"] + 1}, copy / files["a"])
    assert checkpoint_hash(str(copy)) != checkpoint_hash(str(model))


def test_a_damaged_header_is_a_checkpoint_error(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        checkpoint_hash(str(model))


def test_names(model: Path, tmp_path: Path) -> None:
    assert CheckpointIdentity.of_directory(str(model) + "/") == CheckpointIdentity(
        name="m", hash=checkpoint_hash(str(model))
    )
    snapshot = add_to_cache(tmp_path / "hub", "org/m", "c" * 40, model)
    assert CheckpointIdentity.of_directory(str(snapshot)) == CheckpointIdentity(
        name="org/m", revision="c" * 40, hash=checkpoint_hash(str(model))
    )
    assert CheckpointIdentity.of_directory(str(embedded_path("gemray-tiny"))).name == "gemray-tiny"


def test_random_weights_have_no_hash(model: Path) -> None:
    assert CheckpointIdentity.of_directory(str(model), has_weights=False).hash == ""
    (model / "model.safetensors").unlink()
    assert CheckpointIdentity.of_directory(str(model)).hash == "", "a coordinator without weights"
