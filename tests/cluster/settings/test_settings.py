"""Settings: flags over variables over the file; errors say which of them it was."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.scaling import ReplicaLimits
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.settings.errors import InvalidSetting, MissingSetting
from gemray_cluster.settings.settings import (
    ENGINE_NAMES,
    ServeSettings,
    settings_of,
)
from gemray_cluster.settings.sources import unknown_variables
from gemray_cluster.settings.types import parse_size
from gemray_workers.config import EngineConfig
from gemray_workers.embedded import embedded_path
from gemray_workers.errors import InvalidField
from support.checkpoints.hub_cache import add_to_cache
from support.checkpoints.tiny import tiny_checkpoint

MODEL = {"model": "/models/gemma"}


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("in_flag", "in_environment", "in_file", "expected"),
    [
        (True, True, True, 1),
        (False, True, True, 2),
        (False, False, True, 3),
        (True, False, True, 1),
        (False, False, False, None),
    ],
)
def test_precedence(tmp_path: Path, in_flag: bool, in_environment: bool, in_file: bool, expected: int | None) -> None:
    file = write(tmp_path / "gemray.toml", "max_num_seqs = 3\n" if in_file else "")
    flags = {**MODEL, "config": file, "max_num_seqs": "1" if in_flag else None}
    environment = {"GEMRAY_MAX_NUM_SEQS": "2"} if in_environment else {}
    assert ServeSettings.load(flags, environment).max_num_seqs == expected


def test_the_file_can_be_named_by_a_variable_and_hold_everything(tmp_path: Path) -> None:
    file = write(
        tmp_path / "gemray.toml", 'model = "/m"\ntp = 2\nkv_memory = "2GiB"\nport = 0\nstop_deadline_s = 1.5\n'
    )
    settings = ServeSettings.load({}, {"GEMRAY_CONFIG": file})
    assert (settings.model, settings.tp, settings.kv_memory, settings.port) == ("/m", 2, 2 << 30, 0)
    assert settings.cluster_config().stop_deadline_s == 1.5


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        ({"port": "x"}, {}, r"port = 'x' \(from flag --port\) is not allowed: an integer"),
        ({}, {"GEMRAY_PORT": "x"}, r"port = 'x' \(from environment GEMRAY_PORT\)"),
        ({}, {"GEMRAY_PORT": "tcp://10.0.0.1:50051"}, "enableServiceLinks: false"),
        ({"tp": ""}, {}, r"tp = '' \(from flag --tp\)"),
        ({"kv_memory": "2 parsecs"}, {}, "a size such as 2GiB"),
        ({"dtype": "int4"}, {}, "one of auto, bfloat16, float32, float64"),
        ({"start_deadline_s": "nan"}, {}, "seconds, a finite number >= 0"),
        ({"heartbeat_deadline_s": "inf"}, {}, "seconds, a finite number >= 0"),
        ({"dflash_input_scale": "inf"}, {}, r"\(from flag --dflash-input-scale\) is not allowed: a finite number"),
        ({"config": "/nowhere.toml"}, {}, r"config = '/nowhere.toml' \(from flag --config\).*No such file"),
    ],
)
def test_bad_values_name_their_source(flags: dict[str, str], environment: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        ServeSettings.load({**MODEL, **flags}, environment)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kv_memroy = 1\n", r"kv_memroy = 1 \(from .*gemray.toml\) is not allowed: perhaps kv_memory is meant; one of"),
        ("nothing = 1\n", r"nothing = 1 \(from .*gemray.toml\) is not allowed: one of model, tp,"),
        ("port = [1]\n", "a string or a number"),
        ("port = true\n", r"port = 'True' \(from .*gemray.toml\)"),
        ("port = \n", "a TOML file"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        ServeSettings.load({**MODEL, "config": write(tmp_path / "gemray.toml", text)}, {})


def test_missing_model_says_how_to_give_it() -> None:
    with pytest.raises(MissingSetting, match="model is not set: give --model, GEMRAY_MODEL, or model in the file"):
        ServeSettings.load({}, {})


def test_errors_of_a_component_carry_the_users_names() -> None:
    settings = ServeSettings.load({**MODEL, "kv_memory": "0", "port": "70000"}, {"GEMRAY_STRATEGY": "wild"})
    with pytest.raises(InvalidSetting, match=r"kv_memory = 0 \(from flag --kv-memory\)"):
        settings.engine_config("cpu")
    with pytest.raises(InvalidSetting, match=r"port = 70000 \(from flag --port\)"):
        settings.server_config()
    with pytest.raises(InvalidSetting, match=r"strategy = 'wild' \(from environment GEMRAY_STRATEGY\)"):
        settings.cluster_config()


def test_ranks_are_counted_of_a_possible_tp_alone() -> None:
    with pytest.raises(InvalidSetting, match=r"tp = 0 \(from flag --tp\) is not allowed: an integer >= 1"):
        _ = ServeSettings.load({**MODEL, "tp": "0"}, {}).num_ranks


def test_unset_values_are_the_components_own() -> None:
    settings = ServeSettings(model="/m")
    assert settings.server_config() == ServerConfig()
    assert settings.cluster_config() == ClusterConfig()
    engine = settings.engine_config("cuda")
    assert (engine.dtype, engine.kv_memory_bytes, engine.max_num_seqs) == ("bfloat16", None, 32)
    assert settings.engine_config("cpu").dtype == "float32"


def test_kv_memory_is_found_or_stated() -> None:
    found = ServeSettings.load({**MODEL, "kv_memory": "auto", "gpu_memory_utilization": "0.45"}, {})
    assert found == ServeSettings(model="/models/gemma", gpu_memory_utilization=0.45)
    engine = found.engine_config("cuda")
    assert (engine.kv_memory_bytes, engine.gpu_memory_utilization) == (None, 0.45)
    stated = ServeSettings.load({**MODEL, "kv_memory": "40GiB"}, {"GEMRAY_GPU_MEMORY_UTILIZATION": "0.8"})
    with pytest.raises(
        InvalidSetting,
        match=r"gpu_memory_utilization = 0\.8 \(from environment .*\) is not allowed: unset, as kv_memory states",
    ):
        stated.engine_config("cuda")
    assert ServeSettings(model="/m", kv_memory=40 << 30).engine_config("cuda").kv_memory_bytes == 40 << 30
    with pytest.raises(InvalidSetting, match="or auto"):
        ServeSettings.load({**MODEL, "kv_memory": "some"}, {})


def test_drafter_settings_reach_the_engine() -> None:
    flags = {**MODEL, "drafter": "/d", "method": "dflash", "draft_tokens": "5", "drafter_placement": "dedicated"}
    settings = ServeSettings.load({**flags, "tp": "2"}, {})
    engine = settings.engine_config("cpu")
    assert (engine.drafter_path, engine.method, engine.num_draft_tokens) == ("/d", "dflash", 5)
    assert engine.drafter_placement == "dedicated"
    assert settings.num_ranks == 3


def test_two_drafters_come_from_any_source(tmp_path: Path) -> None:
    with_comma = tmp_path / "a, b"
    with_comma.mkdir()
    file = write(tmp_path / "gemray.toml", 'drafter = ["/a", "/b"]\n')
    for flags, environment in (
        ({"drafter": "/a,/b"}, {}),
        ({}, {"GEMRAY_DRAFTER": "/a,/b"}),
        ({"config": file}, {}),
    ):
        settings = ServeSettings.load({**MODEL, **flags}, environment)
        assert settings.engine_config("cpu").drafter_paths == ("/a", "/b")
    one = ServeSettings.load({**MODEL, "drafter": str(with_comma)}, {}).engine_config("cpu")
    assert (one.drafter_path, one.second_drafter_path) == (str(with_comma), None)
    with pytest.raises(InvalidSetting, match=r"drafter = '/a,/b,/c' \(from flag --drafter\).* two of them"):
        ServeSettings.load({**MODEL, "drafter": "/a,/b,/c"}, {})
    with pytest.raises(InvalidSetting, match=r"drafter_placement = 'dedicated'.*colocated, as there are two drafters"):
        ServeSettings.load({**MODEL, "drafter": "/a,/b", "drafter_placement": "dedicated"}, {}).engine_config("cpu")


@pytest.mark.parametrize("again", ["/a", "/a/", "/./a", "/b/../a", "linked"])
def test_one_drafter_twice_is_refused_however_it_is_written(
    again: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linked").symlink_to("/a")
    settings = ServeSettings.load({**MODEL, "drafter": f"/a,{again}"}, {})
    named = Path(again).absolute()
    with pytest.raises(InvalidSetting, match=rf"drafter = '{named}' \(from flag --drafter\).*: two of different kinds"):
        settings.engine_config("cpu")


def test_every_setting_belongs_to_a_component() -> None:
    """A setting that no component knows would have no effect."""
    known = {f.name for config in (ServerConfig, ClusterConfig, EngineConfig, ReplicaLimits) for f in fields(config)}
    known |= {*ENGINE_NAMES.values(), "metrics_port"}
    assert {setting.name for setting in settings_of(ServeSettings)} <= known


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("7", 7), ("3kib", 3072), ("10B", 10)],
        *[("24G", 24 * 10**9), ("40Gi", 40 << 30), ("1.5Ti", 3 << 39), ("8 M", 8_000_000), ("1PiB", 1 << 50)],
        *[("9007199254740993", 9007199254740993), ("0.1GB", 10**8)],
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["24Gb/s", "G", "-1G", "1e9", "9" * 400, "1,5G", "1.5.2G", "40Gii", "inf", ""])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


@given(st.text(max_size=12))
def test_no_text_breaks_the_size_parser(text: str) -> None:
    with suppress(ValueError):
        assert parse_size(text) >= 0


def test_errors_are_the_kind_that_commands_turn_into_a_sentence() -> None:
    assert issubclass(InvalidSetting, InvalidField)


@pytest.mark.parametrize(
    ("flags", "environment", "file", "expected"),
    [
        ({}, {}, "", False),
        ({"random_weights": "true"}, {}, "", True),
        ({}, {"GEMRAY_RANDOM_WEIGHTS": "true"}, "", True),
        ({}, {"GEMRAY_RANDOM_WEIGHTS": "False"}, "random_weights = true", False),
        ({}, {}, "random_weights = true", True),
    ],
)
def test_a_switch(
    tmp_path: Path, flags: dict[str, str], environment: dict[str, str], file: str, expected: bool
) -> None:
    config = {"config": write(tmp_path / "gemray.toml", file)}
    settings = ServeSettings.load({**MODEL, **config, **flags}, environment)
    assert settings.engine_config("cpu").random_weights is expected


def test_a_switch_is_true_or_false() -> None:
    with pytest.raises(InvalidSetting, match=r"random_weights = 'yes' \(from .*\) is not allowed: true or false"):
        ServeSettings.load(MODEL, {"GEMRAY_RANDOM_WEIGHTS": "yes"})


def test_variables_that_are_no_settings_and_what_they_may_have_meant() -> None:
    environment = {
        "GEMRAY_KV_MEMROY": "2GiB",
        "GEMRAY_SERVICE_HOST": "10.0.0.1",
        "GEMRAY_QQ": "",
        "GEMRAY_TP": "2",
        "HOME": "/",
    }
    assert unknown_variables(environment, settings_of(ServeSettings)) == {
        "GEMRAY_KV_MEMROY": "GEMRAY_KV_MEMORY",
        "GEMRAY_QQ": None,
        "GEMRAY_SERVICE_HOST": None,
    }


def test_a_field_of_the_models_files_has_no_setting_as_its_origin(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("31B"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    settings = ServeSettings(model=str(model))
    with pytest.raises(InvalidField, match="'awq'") as caught:
        settings.blueprint("cpu")
    assert "from the default" not in str(caught.value)


def test_directories_are_absolute_since_ranks_run_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").mkdir()
    settings = ServeSettings.load({"model": "./target/", "drafter": "../drafter,other"}, {})
    assert settings.model == str(tmp_path / "target")
    assert settings.drafter == (f"{tmp_path}/../drafter", f"{tmp_path}/other")


def test_a_model_of_the_hub_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    target, drafter = embedded_path("gemray-tiny"), embedded_path("gemray-tiny-dflash")
    snapshot = add_to_cache(tmp_path, "google/gemma-4-31b-it", "a" * 40, target)
    of_drafter = add_to_cache(tmp_path, "z-lab/gemma-dflash", "b" * 40, drafter)
    loaded = ServeSettings.load({"model": "google/gemma-4-31b-it", "drafter": "z-lab/gemma-dflash@main"}, {})
    assert (loaded.model, loaded.drafter) == (str(snapshot), (str(of_drafter),))


def test_a_model_that_is_not_in_the_cache_comes_with_the_command_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InvalidSetting) as caught:
        ServeSettings.load({"model": "google/gemma-4-31b-it"}, {})
    assert str(caught.value).startswith(
        "model = 'google/gemma-4-31b-it' (from flag --model) is not allowed: a directory"
    )
    assert f"cache ({tmp_path}), into which `hf download google/gemma-4-31b-it` brings it" in str(caught.value)


@pytest.mark.parametrize("flag", ["model", "drafter"])
def test_a_misspelt_embedded_name_comes_with_the_one_that_is_meant(flag: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        ServeSettings.load({"model": "gemray-tiny", flag: "gemray-tiny-asistant"}, {})
    assert str(caught.value).endswith("; did you mean gemray-tiny-assistant?")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("GEMRAY-TINY", "gemray-tiny"),
        ("https://huggingface.co/google/gemma-4-31B-it", "google/gemma-4-31B-it"),
        ("https://huggingface.co/google/gemma-4-31B-it/tree/main", "google/gemma-4-31B-it"),
        ("hf://google/gemma-4-31B-it", "google/gemma-4-31B-it"),
    ],
)
def test_a_model_in_another_spelling_comes_with_its_name(written: str, meant: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        ServeSettings.load({"model": written}, {})
    assert str(caught.value).endswith(f"; did you mean {meant}?")
