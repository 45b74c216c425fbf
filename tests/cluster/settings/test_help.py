"""What --help, values.yaml and the README say of defaults is what the configs' fields hold."""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.settings.settings import DEFAULT_KV_MEMORY, ENGINE_NAMES, ServeSettings, settings_of
from gemray_cluster.settings.types import parse_size
from gemray_workers.config import USUAL_STEP_TOKENS, EngineConfig

ROOT = Path(__file__).resolve().parents[3]
SETTINGS: dict[str, Field[Any]] = {setting.name: setting for setting in settings_of(ServeSettings)}
OWNERS: dict[str, Field[Any]] = {
    ENGINE_NAMES.get(owned.name, owned.name): owned
    for config in (EngineConfig, ClusterConfig, ServerConfig)
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
        assert math.isclose(parse_size(told), default, abs_tol=0.0)


def test_help_tells_the_defaults_that_depend() -> None:
    assert SETTINGS["kv_memory"].metadata["help"].endswith(in_words(DEFAULT_KV_MEMORY) + ").")
    assert told_default("max_step_tokens") == str(USUAL_STEP_TOKENS)


def in_words(by_device: Any) -> str:
    return f"{by_device['cuda'] >> 30}GiB on GPUs, {by_device['cpu'] >> 30}GiB on CPUs"


def test_the_charts_values_are_the_servers_defaults() -> None:
    text = (ROOT / "helm/gemray/values.yaml").read_text()
    values = yaml.safe_load(text)
    assert values["server"]["port"] == OWNERS["port"].default
    assert values["drafter"]["method"] == OWNERS["method"].default
    assert values["drafter"]["placement"] == OWNERS["drafter_placement"].default
    assert values["drafter"]["draftTokens"] == SETTINGS["draft_tokens"].default
    assert values["gang"]["tensorParallelSize"] == SETTINGS["tp"].default
    assert f"empty: {in_words(DEFAULT_KV_MEMORY)}" in text


def test_the_readme_tells_flags_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    flags = set(re.findall(r"^\| `--([a-z-]+)", readme, re.MULTILINE))
    assert len(flags) > 5
    assert {flag.replace("-", "_") for flag in flags} <= SETTINGS.keys()
    assert f"N times within five minutes ({OWNERS['max_rebuilds'].default})" in readme
