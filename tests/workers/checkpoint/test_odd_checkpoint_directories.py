"""Directories as people leave them: files that belong to nothing, links to nowhere, fields of other formats."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gemray_cluster.check.model_directory import check_model_directory
from gemray_cluster.check.result import Status
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.checkpoint.generation import GenerationDefaults
from gemray_workers.checkpoint.index import INDEX_FILE, SINGLE_FILE, read_index
from gemray_workers.errors import CheckpointError, GemrayError, InvalidField
from gemray_workers.model.config import ModelConfig
from support.checkpoints.servable_checkpoint import CONFIG, write_servable_checkpoint

EMBEDDING = "model.embed_tokens.weight"
FLAT: dict[str, Any] = {"model_type": "gemma4_text", **CONFIG}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_servable_checkpoint(tmp_path / "model")


def shard(checkpoint: Path) -> None:
    """Put an index beside the weights."""
    names = list(read_index(checkpoint).tensors)
    (checkpoint / SINGLE_FILE).rename(checkpoint / "part.safetensors")
    weight_map = dict.fromkeys(names, "part.safetensors")
    (checkpoint / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("stray", ["backup.safetensors", "a.safetensors"])
def test_a_stray_file_is_not_looked_at(checkpoint: Path, stray: str, with_index: bool) -> None:
    """Its embedding has 100 rows more, which would pass for added tokens."""
    if with_index:
        shard(checkpoint)
    save_file({EMBEDDING: torch.zeros(2148, 128)}, checkpoint / stray)
    config = ModelConfig.from_directory(checkpoint)
    assert (config.vocab_size, config.num_added) == (2048, 0)
    assert {tensor.file.name for tensor in read_index(checkpoint).tensors.values()} == {
        "part.safetensors" if with_index else SINGLE_FILE
    }


def test_added_rows_of_a_shard_are_counted(checkpoint: Path) -> None:
    shard(checkpoint)
    index = json.loads((checkpoint / INDEX_FILE).read_text())
    save_file({EMBEDDING: torch.zeros(2050, 128)}, checkpoint / "embedding.safetensors")
    index["weight_map"][EMBEDDING] = "embedding.safetensors"
    (checkpoint / INDEX_FILE).write_text(json.dumps(index))
    assert ModelConfig.from_directory(checkpoint).num_added == 2


def break_link(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(file.parent / "blobs" / "gone")


@pytest.mark.parametrize("name", [SINGLE_FILE, INDEX_FILE])
def test_weights_behind_a_broken_link(checkpoint: Path, name: str) -> None:
    break_link(checkpoint / name)
    with pytest.raises(CheckpointError) as caught:
        read_index(checkpoint)
    assert str(caught.value) == f"{checkpoint / name} is a link to {checkpoint}/blobs/gone, which is not there"


def test_a_shard_behind_a_broken_link(checkpoint: Path) -> None:
    shard(checkpoint)
    break_link(checkpoint / "part.safetensors")
    with pytest.raises(CheckpointError, match=r"are missing: part\.safetensors \(a link to nowhere\)"):
        read_index(checkpoint)


def test_a_stray_broken_link_is_nobodys_business(checkpoint: Path) -> None:
    shard(checkpoint)
    break_link(checkpoint / "backup.safetensors")
    assert ModelConfig.from_directory(checkpoint).vocab_size == 2048
    assert read_index(checkpoint).tensors


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_settings_behind_a_broken_link(checkpoint: Path, name: str) -> None:
    """A generation_config.json that is not there is no error; one whose link is broken would be lost in silence."""
    break_link(checkpoint / name)
    defaults = partial(GenerationDefaults.from_directory, vocab_size=2048)
    read: Callable[[Path], object] = ModelConfig.from_directory if name == "config.json" else defaults
    with pytest.raises(CheckpointError, match=rf"{name} is a link to .*/blobs/gone, which is not there"):
        read(checkpoint)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizer_behind_a_broken_link(checkpoint: Path, name: str) -> None:
    break_link(checkpoint / name)
    with pytest.raises(CheckpointError, match=rf"{name} is a link to .*/blobs/gone, which is not there"):
        ChatTokenizer.from_directory(checkpoint)


def test_check_tells_of_a_broken_link(checkpoint: Path) -> None:
    shard(checkpoint)
    break_link(checkpoint / "part.safetensors")
    assert "lacks part.safetensors (a link to nowhere)" in check_model_directory(str(checkpoint), node="here").sentence


def leave_pointer(file: Path) -> None:
    """As a clone without Git LFS has it."""
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 62441234567\n")


@pytest.mark.parametrize("name", [SINGLE_FILE, "part.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_told_from_a_damaged_file(checkpoint: Path, name: str) -> None:
    if name == "part.safetensors":
        shard(checkpoint)
    leave_pointer(checkpoint / name)
    read: Callable[[Path], object] = ChatTokenizer.from_directory if name == "tokenizer.json" else read_index
    with pytest.raises(CheckpointError, match=rf"{name} is a pointer of Git LFS, not the file: `git lfs pull` in"):
        read(checkpoint)
    found = check_model_directory(str(checkpoint), node="here").sentence
    assert f"lacks {name}" in found
    assert f" (a pointer of Git LFS): the copy is not complete; `git lfs pull` in {checkpoint} brings the rest" in found


def test_weights_that_begin_otherwise_are_no_pointer(checkpoint: Path) -> None:
    (checkpoint / SINGLE_FILE).write_bytes(b"version 2")
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        read_index(checkpoint)


@pytest.mark.parametrize("part", ["", "snapshots"])
def test_the_cache_s_own_folder_of_a_model_comes_with_its_name(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "models--google--gemma-4-31B-it"
    write_servable_checkpoint(folder / "snapshots" / ("a" * 40))
    found = check_model_directory(str(folder / part), node="here")
    assert found.sentence.endswith("is the cache's folder of google/gemma-4-31B-it: --model takes it by that name.")
    with pytest.raises(CheckpointError, match=r"folder of google/gemma-4-31B-it, not a model's: it is served by that"):
        ModelConfig.from_directory(folder / part)
    assert check_model_directory(str(folder / "snapshots" / ("a" * 40)), node="here").status is Status.OK


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds an adapter \(adapter_config\.json\), not a model: merge it"):
        ModelConfig.from_directory(tmp_path)


# --- fields of other formats ------------------------------------------------------------------------------------------

ROPES = [
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "proportional", "rope_theta": 1e6},
    {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    {"full_attention": {}, "sliding_attention": {}},
    {"full_attention": 1, "sliding_attention": 2},
    {kind: {"rope_type": "default", "rope_theta": "a"} for kind in ("full_attention", "sliding_attention")},
    {kind: {"rope_type": "default", "rope_theta": -1} for kind in ("full_attention", "sliding_attention")},
    {kind: {"rope_type": ["default"], "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")},
]


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", ROPES, ids=range(len(ROPES)))
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
def test_rope_of_another_form_is_refused_in_words(tmp_path: Path, name: str, value: dict[str, Any]) -> None:
    with pytest.raises((InvalidField, CheckpointError), match="rope"):
        ModelConfig.from_directory(write_config(tmp_path, FLAT | {name: value}))


def test_no_rope_scaling_is_no_error(tmp_path: Path) -> None:
    plain = ModelConfig.from_directory(write_config(tmp_path, FLAT))
    assert ModelConfig.from_directory(write_config(tmp_path, FLAT | {"rope_scaling": None})) == plain


ODD = [None, "x", [], -1, True, [None], {"a": 1}]


@pytest.mark.parametrize("field", [*FLAT, "text_config"])
@pytest.mark.filterwarnings("ignore")
def test_an_odd_value_is_an_error_in_words_or_none(tmp_path: Path, field: str) -> None:
    for value in ODD:
        write_config(tmp_path, FLAT | {field: value})
        with contextlib.suppress(GemrayError):  # anything else fails the test
            assert ModelConfig.from_directory(tmp_path).num_layers > 0


def test_headers_of_files_larger_than_memory_are_read(tmp_path: Path) -> None:
    """A file that is a hole of 1 TiB, which no machine that runs tests may map as memory of its own."""
    size = 1 << 40
    header = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [1 << 20, 1 << 20], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    (stored,) = read_index(tmp_path).tensors.values()
    assert (stored.name, stored.shape, stored.dtype) == ("w", (1 << 20, 1 << 20), "F8_E4M3")
