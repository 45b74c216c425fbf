"""What --help, values.yaml and the README say of defaults is what the configs' fields hold."""

from __future__ import annotations

import json
import math
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.scaling import ReplicaLimits
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.settings.settings import ENGINE_NAMES, ServeSettings, settings_of
from gemray_cluster.settings.types import parse_size
from gemray_workers.config import USUAL_STEP_TOKENS, EngineConfig
from gemray_workers.errors import InvalidField
from gemray_workers.ranges import ranges_of

ROOT = Path(__file__).resolve().parents[3]
SETTINGS: dict[str, Field[Any]] = {setting.name: setting for setting in settings_of(ServeSettings)}
OWNERS: dict[str, Field[Any]] = {
    ENGINE_NAMES.get(owned.name, owned.name): owned
    for config in (EngineConfig, ClusterConfig, ServerConfig, ReplicaLimits)
    for owned in fields(config)
}
"""The config field behind each setting, by the setting's name."""
FIXED = [
    name
    for name, setting in SETTINGS.items()
    if setting.default is None and name in OWNERS and OWNERS[name].default not in (None, MISSING)
]
"""Settings that leave a default other than "none" to the config."""


def told_default(name: str) -> str:
    found = re.search(r"\(default:? ([^,;:)]+)", SETTINGS[name].metadata["help"])
    assert found is not None, f"--help of {name} tells no default"
    return found[1]


@pytest.mark.parametrize("name", FIXED)
def test_help_tells_the_default_of_the_config(name: str) -> None:
    default: Any = OWNERS[name].default
    told = told_default(name)
    if isinstance(default, str):
        assert told == default
    else:
        assert math.isclose(float(told) if isinstance(default, float) else parse_size(told), default, abs_tol=0.0)


def test_help_tells_the_defaults_that_depend() -> None:
    assert told_default("max_step_tokens") == str(USUAL_STEP_TOKENS)


def test_help_tells_the_range_that_the_config_checks() -> None:
    checked = {
        ENGINE_NAMES.get(name, name): str(bounds)
        for config in (EngineConfig, ClusterConfig, ServerConfig, ReplicaLimits)
        for name, bounds in ranges_of(config).items()
    }
    told = {name: setting.metadata["bounds"] for name, setting in SETTINGS.items() if setting.metadata["bounds"]}
    assert told == checked
    for name, bounds in told.items():
        assert SETTINGS[name].metadata["help"].endswith(f"; {bounds}."), name


@pytest.mark.parametrize("config", [EngineConfig, ClusterConfig, ServerConfig, ReplicaLimits])
def test_the_bounds_are_allowed_and_nothing_beside_them(config: type[Any]) -> None:
    required = {"model_path": "m", "tensor_parallel_size": 1, "dtype": "float32", "device": "cpu", "kv_memory_bytes": 1}
    own = {name: value for name, value in required.items() if name in {f.name for f in fields(config)}}
    for name, bounds in ranges_of(config).items():
        step = 1e-9 if bounds.excludes_least else 1
        assert getattr(config(**{**own, name: bounds.least + (step if bounds.excludes_least else 0)}), name) in bounds
        outside = [bounds.least if bounds.excludes_least else bounds.least - step, math.nan]
        for value in outside if bounds.most is None else [*outside, bounds.most + 1]:
            with pytest.raises(InvalidField) as caught:
                config(**{**own, name: value})
            assert caught.value.field == name
            assert str(bounds) in caught.value.allowed


def test_the_charts_values_are_the_servers_defaults() -> None:
    text = (ROOT / "helm/gemray/values.yaml").read_text()
    values = yaml.safe_load(text)
    assert values["server"]["port"] == OWNERS["port"].default
    assert values["drafter"]["method"] == OWNERS["method"].default
    assert values["drafter"]["placement"] == OWNERS["drafter_placement"].default
    assert values["drafter"]["draftTokens"] == SETTINGS["draft_tokens"].default
    assert values["server"]["kvMemory"] == SETTINGS["kv_memory"].default
    assert re.search(
        rf"gpuMemoryUtilization: 0  # .*; 0: {OWNERS['gpu_memory_utilization'].default}$", text, re.MULTILINE
    )
    assert values["gang"]["tensorParallelSize"] == SETTINGS["tp"].default
    schema = json.loads((ROOT / "helm/gemray/values.schema.json").read_text())
    bounds = ranges_of(EngineConfig) | ranges_of(ServerConfig)
    drafts = schema["properties"]["drafter"]["properties"]["draftTokens"]["oneOf"][1]
    assert drafts == {"type": "integer", "minimum": bounds["num_draft_tokens"].least}
    length = schema["properties"]["server"]["properties"]["maxModelLen"]["oneOf"][1]
    assert length == {"type": "integer", "minimum": bounds["max_model_len"].least}
    assert schema["definitions"]["port"]["maximum"] == bounds["port"].most
    assert re.search(rf"draftTokens: auto  # {bounds['num_draft_tokens']}, ", text)
    assert re.search(rf"maxModelLen: 0  # {bounds['max_model_len']} tokens; 0: ", text)


FLAG_ROW = re.compile(r"^\| `--([a-z-]+)[^|]*(?:\\\|[^|]*)?\|.* \((default .*|[<>=0-9].*)\) \|$", re.MULTILINE)
"""A row of a table of flags that ends with the default, the range or both: ``(default 1; 0 or 1)``."""


def test_the_readmes_table_tells_defaults_and_ranges_of_the_fields() -> None:
    rows = FLAG_ROW.findall((ROOT / "README.md").read_text())
    assert len(rows) >= 7
    for flag, told in rows:
        setting = SETTINGS[flag.replace("-", "_")]
        in_help = re.search(r"\(default ([^:;)]+)[;)]", setting.metadata["help"])
        default = in_help[1] if in_help else setting.default
        parts = told.split("; ")
        if parts[0].startswith("default "):
            assert parts.pop(0) == f"default {default}", flag
        assert parts in ([], [setting.metadata["bounds"]]), flag


def test_the_documents_tell_the_deadlines_of_the_fields() -> None:
    deploy = (ROOT / "docs/deploy.md").read_text()
    assert f"`--max-rebuilds` failures within five minutes ({OWNERS['max_rebuilds'].default})" in deploy
    assert f"`no room for the gang within {OWNERS['placement_deadline_s'].default:g} s`" in deploy


def test_the_readme_tells_flags_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    flags = set(re.findall(r"^\| `--([a-z-]+)", readme, re.MULTILINE))
    assert len(flags) > 5
    off = {f"no_{name}" for name, setting in SETTINGS.items() if setting.default is True}
    assert {flag.replace("-", "_") for flag in flags} <= SETTINGS.keys() | off
