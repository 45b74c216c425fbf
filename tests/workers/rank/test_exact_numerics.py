"""Exact numerics: where they are refused, before anything is loaded, and what the model's info says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gemray_workers.errors import InvalidField
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.exact_numerics import require_exact_device
from support.checkpoints.quantized import quantized_checkpoint
from support.checkpoints.tiny import tiny_checkpoint
from support.engine.engine_runner import engine_config


def blueprint(directory: Path | None = None, **changes: Any) -> Blueprint:
    settings = {"numerics": "exact", "dtype": "bfloat16", **changes}
    return Blueprint.of(engine_config(directory or tiny_checkpoint("31B"), **settings))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "cuda", "dtype": "float64"}, "on GPUs exact takes bfloat16 and float32, not float64"),
        ({"numerics": "perfect"}, "one of fast, exact"),
    ],
)
def test_what_has_no_exact_numerics_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidField) as raised:
        blueprint(**changes)
    assert raised.value.field == "numerics"
    assert why in raised.value.allowed


def test_packed_weights_are_taken() -> None:
    packed, _ = quantized_checkpoint(tiny_checkpoint("31B"), lambda name: "int4-channel" if "mlp" in name else None)
    assert blueprint(packed).model_info().numerics == "exact"


def test_widths_that_eight_shards_do_not_divide_are_refused(tmp_path: Path) -> None:
    config = json.loads((tiny_checkpoint("31B") / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 100
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidField, match=r"fast: exact takes multiples of 8, which are no intermediate_size = 100"):
        blueprint(tmp_path, random_weights=True)


def test_more_ranks_than_shards_are_refused(tmp_path: Path) -> None:
    config = json.loads((tiny_checkpoint("31B") / "config.json").read_text())
    config["text_config"] |= {"num_attention_heads": 16, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidField, match=r"numerics = 'exact' .*fast: exact takes 1, 2, 4 or 8 ranks, not 16"):
        blueprint(tmp_path, tensor_parallel_size=16, random_weights=True)


@pytest.mark.parametrize("size", [3, 16])
def test_ranks_that_no_numerics_fit_are_told_as_such(size: int) -> None:
    with pytest.raises(InvalidField, match=rf"tensor_parallel_size = {size} is not allowed: it must divide"):
        blueprint(tensor_parallel_size=size)


@pytest.mark.parametrize(("capability", "is_taken"), [((9, 0), True), ((8, 9), False), ((10, 0), False)])
def test_only_the_cards_that_it_is_tested_on_have_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_taken: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    config = engine_config("model", numerics="exact", dtype="bfloat16", device="cuda")
    if is_taken:
        require_exact_device(config, torch.device("cuda", 0))
        return
    with pytest.raises(InvalidField, match=r"fast: a card has compute capability \d+\.\d, exact takes 9\.x"):
        require_exact_device(config, torch.device("cuda", 0))


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_the_info_tells_the_numerics(numerics: str) -> None:
    assert blueprint(numerics=numerics).model_info().numerics == numerics
