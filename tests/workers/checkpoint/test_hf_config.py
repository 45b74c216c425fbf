"""Ranks take the coordinator's reading of a config.json, and import transformers only without one that fits, for a file
that leaves fields to its defaults.

Nor do they import torch's compiler, which takes as long.
"""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemray_workers.checkpoint.hf_config import fingerprint
from gemray_workers.config import EngineConfig
from gemray_workers.drafters.mtp.config import AssistantConfig
from gemray_workers.embedded import EmbeddedName, embedded_path
from gemray_workers.errors import InvalidField
from gemray_workers.model.config import ModelConfig
from gemray_workers.rank.blueprint import Blueprint
from support.checkpoints.tiny import Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config
from support.waiting import HANG_S

DRAFTERS: tuple[EmbeddedName, ...] = ("gemray-tiny-assistant-centroid", "gemray-tiny-dflash")
SHAPES: tuple[Shape, ...] = ("E2B", "26B-A4B")

RANKS_IN_A_PROCESS = """
import pickle, sys
from gemray_workers.rank.process import ProcessLocation, RankSetup
from gemray_workers.rank.worker import RankWorker
for config in pickle.load(sys.stdin.buffer):
    rank = RankWorker(config, 0, lambda config: ProcessLocation("node", "127.0.0.1", None))
    info, _ = rank.load(RankSetup(rendezvous="", interface_ip="127.0.0.1", threads=1))
    print(info.num_layers, *sorted({"transformers", "torch._dynamo", "sympy"} & set(sys.modules)))
"""


def load_elsewhere(configs: list[EngineConfig]) -> list[list[str]]:
    """Layers of the models that ranks load, one after the other, in a fresh process, and what of all that takes long to
    import is imported by then."""
    ran = subprocess.run(
        [sys.executable, "-c", RANKS_IN_A_PROCESS], input=pickle.dumps(configs), capture_output=True, timeout=HANG_S,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr.decode()
    return [line.split() for line in ran.stdout.decode().splitlines()]


def config_with_its_reading(target: Path, **changes: Any) -> EngineConfig:
    """As the coordinator hands it to ranks."""
    config = engine_config(target, max_step_tokens=256, max_model_len=128, max_num_seqs=2, **changes)
    Blueprint.of(config)
    return config


def test_a_rank_with_the_reading_imports_neither_transformers_nor_torchs_compiler() -> None:
    """Layers that are laid out on the meta device must not compute there: torch does so in Python that imports it. A
    rank without the reading of a file that leaves out fields imports transformers."""
    family = embedded_path("gemray-tiny")
    drafters = (None, *map(embedded_path, DRAFTERS))
    configs = [config_with_its_reading(family, drafter_path=None if path is None else str(path)) for path in drafters]
    configs += [config_with_its_reading(tiny_checkpoint(shape)) for shape in SHAPES]
    configs.append(replace(configs[1], hf_configs={}))  # both files state every field
    layers = [str(Blueprint.of(config).model.num_layers) for config in configs]
    configs[-1].hf_configs.clear()
    *with_it, (_, *imported) = load_elsewhere([*configs, replace(configs[-2], hf_configs={})])
    assert with_it == [[number] for number in layers]
    assert "transformers" in imported


@pytest.mark.parametrize("shape", ["E2B", "26B-A4B", "31B"])
@pytest.mark.parametrize("make", [None, tiny_assistant, tiny_dflash])
def test_the_reading_gives_the_same_blueprint(shape: Any, make: Any) -> None:
    target = tiny_checkpoint(shape)
    drafter = None if make is None else str(make(target))
    config = engine_config(target, drafter_path=drafter, max_step_tokens=256)
    drawn = Blueprint.of(config)
    passed_on = pickle.loads(pickle.dumps(config))
    assert passed_on == config
    assert set(passed_on.hf_configs) == set(config.hf_configs) != set()
    again = Blueprint.of(passed_on)
    assert again.model == drawn.model
    assert again.model_info() == drawn.model_info()
    assert again.drafter.traits == drawn.drafter.traits


def test_another_config_on_a_ranks_node_is_read_there(tmp_path: Path) -> None:
    """Equal paths, other files: the reading is of the content, not of the name."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("31B"), directory)
    config = engine_config(directory)
    Blueprint.of(config)
    content = json.loads((directory / "config.json").read_text())
    content["text_config"]["rms_norm_eps"] = 1e-3
    (directory / "config.json").write_text(json.dumps(content, indent=7))
    assert Blueprint.of(config).model.rms_norm_eps == 1e-3


def test_a_target_is_no_assistant_though_its_reading_is_known() -> None:
    directory = tiny_checkpoint("31B")
    known: dict[str, Any] = {}
    target = ModelConfig.from_directory(directory, known)
    with pytest.raises(InvalidField, match="drafter model_type"):
        AssistantConfig.from_directory(directory, target, known)


def test_fingerprints_tell_contents_apart_and_not_their_order() -> None:
    assert fingerprint({"a": 1, "b": [2.0]}) == fingerprint({"b": [2.0], "a": 1})
    assert len({fingerprint({"a": value}) for value in (1, 1.5, "1", None, [1])}) == 5
