"""Each field of a DFlash config, deleted, nulled or mistyped: an error of gemray's, or a plan."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from gemray_workers.drafters.plan import plan_drafter
from gemray_workers.errors import GemrayError, InvalidField
from gemray_workers.model.config import ModelConfig
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import edited_drafter, tiny_dflash
from support.engine.engine_runner import engine_config

TARGET = tiny_checkpoint("31B")
MODEL = ModelConfig.from_directory(TARGET)
DFLASH = json.loads((tiny_dflash(TARGET) / "config.json").read_text())
MISSING = object()
VALUES: tuple[Any, ...] = (
    MISSING,
    None,
    "16",
    "",
    -1,
    0,
    1.5,
    [],
    [None],
    {},
    {"a": None},
    True,
    10**30,
    float("nan"),
    float("inf"),
)


def plan(directory: Path, **settings: Any) -> Any:
    return plan_drafter(engine_config(TARGET, drafter_path=str(directory), **settings), MODEL)


@pytest.mark.parametrize(
    "path", [*((key,) for key in DFLASH), *(("dflash_config", k) for k in DFLASH["dflash_config"])]
)
def test_only_named_errors(tmp_path: Path, path: tuple[str, ...]) -> None:
    for value in VALUES:
        config = json.loads(json.dumps(DFLASH))
        holder = config if len(path) == 1 else config[path[0]]
        holder.pop(path[-1]) if value is MISSING else holder.update({path[-1]: value})
        (tmp_path / "config.json").write_text(json.dumps(config))
        with contextlib.suppress(GemrayError):
            plan(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dflash_config", None, r"drafter dflash_config = None .* an object"),
        ("block_size", None, "drafter block_size = None .* an integer >= 2"),
        ("block_size", "16", "drafter block_size = '16' .* an integer >= 2"),
        ("sliding_window", None, "drafter sliding_window = None .* an integer >= 1"),
        ("vocab_size", None, "drafter vocab_size = None .* an integer"),
        ("num_key_value_heads", 3, "num_key_value_heads = 3 .* a divisor of num_attention_heads = 8"),
        ("attention_bias", True, "attention_bias = True .* False"),
    ],
)
def test_field_value_and_what_is_allowed(tmp_path: Path, field: str, value: Any, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**DFLASH, field: value}))
    with pytest.raises(InvalidField, match=message):
        plan(tmp_path)


def test_ranks_divide_the_mlp(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match=r"tensor_parallel_size = 2 .* intermediate_size = 49"):
        plan(edited_drafter(tiny_dflash(TARGET), tmp_path / "d", intermediate_size=49), tensor_parallel_size=2)
