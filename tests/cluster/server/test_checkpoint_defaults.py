"""What a request leaves unset comes from generation_config.json, all of it; what it sets wins."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.convert import model_info
from gemray_cluster.server.requests import RequestReader
from gemray_cluster.server.sampling import read_sampling
from gemray_workers.errors import InvalidField
from gemray_workers.sampling.params import SamplingParams
from support.checkpoints.servable_checkpoint import write_servable_checkpoint
from support.cluster.fake_gang import gang_info
from support.cluster.serving import DEFAULTS

INFO = gang_info(max_model_len=256)
SAID = dataclasses.replace(DEFAULTS, min_p=0.1, repetition_penalty=1.3, min_new_tokens=3, stop_strings=("END",))


def read(defaults: Any, prompt_len: int = 10, **fields: Any) -> tuple[SamplingParams, tuple[str, ...]]:
    sampling = pb.SamplingParameters(**fields)
    params, output = read_sampling(sampling, pb.SpeculationParameters(), defaults, INFO.model, prompt_len=prompt_len)
    return params, output.stops


def test_unset_fields_are_the_checkpoints() -> None:
    params, stops = read(SAID)
    assert (params.min_p, params.repetition_penalty, params.min_tokens, stops) == (0.1, 1.3, 3, ("END",))
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 64, 0.95)


def test_set_fields_win_zero_too() -> None:
    params, stops = read(SAID, min_p=0.0, repetition_penalty=1.0, min_tokens=0, stop=["x"], temperature=0.0, top_k=0)
    assert (params.min_p, params.repetition_penalty, params.min_tokens, stops) == (0.0, 1.0, 0, ("x",))
    assert (params.temperature, params.top_k) == (0.0, 0)


@pytest.mark.parametrize(
    ("said", "fields", "max_tokens"),
    [
        ({}, {}, 246),
        ({"max_new_tokens": 20}, {}, 20),
        ({"max_new_tokens": 20, "max_length": 15}, {}, 20),
        ({"max_new_tokens": 20}, {"max_tokens": 30}, 30),
        ({"max_new_tokens": 1000}, {}, 246),
        ({"max_length": 15}, {}, 5),
        ({"max_length": 5}, {"max_tokens": 7}, 7),
        ({"max_length": 4096}, {}, 246),
    ],
)
def test_budget(said: dict[str, Any], fields: dict[str, Any], max_tokens: int) -> None:
    assert read(dataclasses.replace(DEFAULTS, **said), **fields)[0].max_tokens == max_tokens


def test_a_length_that_leaves_no_room_is_told() -> None:
    with pytest.raises(InvalidField, match="max_length of 10 leaves no room behind a prompt of 10 tokens"):
        read(dataclasses.replace(DEFAULTS, max_length=10))


def test_a_short_budget_of_the_request_wins_over_the_checkpoints_least() -> None:
    assert read(SAID, max_tokens=2)[0].min_tokens == 2


def test_model_info_tells_them() -> None:
    said = dataclasses.replace(SAID, max_new_tokens=20)
    told = model_info(INFO, said).generation_defaults
    assert (told.min_p, told.repetition_penalty, told.max_tokens, told.min_tokens) == (0.1, 1.3, 20, 3)
    assert list(told.stop) == ["END"]
    assert not told.HasField("max_length")
    assert not model_info(INFO, DEFAULTS).generation_defaults.HasField("max_tokens")


def test_what_no_request_could_have_ends_the_start(tmp_path: Path) -> None:
    write_servable_checkpoint(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 1e-6}))
    with pytest.raises(
        InvalidField, match=r"generation_config\.json: temperature = 1e-06 is not allowed: 0 \(greedy\)"
    ):
        RequestReader.from_directory(str(tmp_path))
