"""What is wrong with a JSON file of a checkpoint is told with the file, and by what it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gemray_workers.checkpoint.json_file import read_json_object
from gemray_workers.drafters.mtp.config import AssistantConfig
from gemray_workers.embedded import embedded_path
from gemray_workers.errors import CheckpointError, InvalidField
from gemray_workers.model.config import ModelConfig


def test_a_file_that_is_not_there_is_no_faulty_json(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "config.json", tmp_path):
        with pytest.raises(CheckpointError, match=rf"^{path} cannot be read \((No such file|Is a directory)"):
            read_json_object(path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not readable JSON: "):
        read_json_object(tmp_path / "config.json")


def test_quantization_of_an_assistant_that_is_no_object(tmp_path: Path) -> None:
    directory = tmp_path / "assistant"
    shutil.copytree(embedded_path("gemray-tiny-assistant"), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": [1]}))
    target = ModelConfig.from_directory(embedded_path("gemray-tiny"))
    with pytest.raises(
        InvalidField, match=r"quantization_config in .*assistant/config\.json = list is not allowed: an object"
    ):
        AssistantConfig.from_directory(directory, target)
