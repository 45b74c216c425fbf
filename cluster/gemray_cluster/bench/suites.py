"""Suites: TOML files of setups."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemray_cluster.bench.load import Load
from gemray_cluster.bench.names import check_names
from gemray_cluster.bench.settings import Setup
from gemray_cluster.settings.types import NotAllowed, model_directory
from gemray_workers.errors import InvalidField


def read_suite(path: Path, changes: Mapping[str, Any], only: Sequence[str] = ()) -> list[Setup]:
    """Setups of a TOML file: ``[[setup]]`` tables over an optional ``[defaults]``; relative paths start at the file.

    Args:
        path: the file.
        changes: values that win over the file's.
        only: names of the setups wanted; all if empty.
    """
    setups = []
    content = read_toml("suite", path)
    if not _are_tables(content):
        raise InvalidField("suite", str(path), "a file with [[setup]] and [defaults] tables")
    load = load_of(content, path)
    for table in content.get("setup", []):
        values = {**content.get("defaults", {}), **table}
        if "load" in values:
            raise InvalidField("load", values["load"], f"a table beside the setups, which all have it (in {path})")
        check_names(Setup, {"name": "", "model": "", **values}, str(path))
        if values.get("model"):
            values["model"] = directory_of("model", values["model"], path.parent)
        if drafters := values.get("drafter"):
            drafters = [drafters] if isinstance(drafters, str) else drafters
            values["drafter"] = [directory_of("drafter", drafter, path.parent) for drafter in drafters]
        loaded = {} if load is None else {"load": load}
        setups.append(Setup.of({**loaded, **values, **changes}, str(path)))
    if not setups:
        raise InvalidField("suite", str(path), "a file with [[setup]] tables")
    names = [setup.name for setup in setups]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidField(
            "name", twice, f"another one for each setup: tables and --only tell them apart by it (in {path})"
        )
    if unknown := [name for name in only if name not in names]:
        raise InvalidField("only", unknown[0], "one of " + ", ".join(names))
    return [setup for setup in setups if not only or setup.name in only]


def _are_tables(content: Mapping[str, Any]) -> bool:
    setups = content.get("setup", [])
    return isinstance(setups, list) and all(isinstance(table, dict) for table in (*setups, content.get("defaults", {})))


def load_of(content: Mapping[str, Any], path: Path) -> Load | None:
    """The ``[load]`` table of a suite, which every setup of it is put under; None where there is none.

    Raises InvalidField for what a load cannot be.
    """
    if "load" not in content:
        return None
    if not isinstance(content["load"], dict):
        raise InvalidField("load", content["load"], f"a table (in {path})")
    return Load.of(content["load"], str(path))


def read_toml(name: str, path: Path) -> dict[str, Any]:
    """The content of the file that a setting names; raises InvalidField."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidField(name, str(path), f"a readable TOML file ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidField(name, str(path), f"a TOML file ({error})") from error


def directory_of(field: str, model: str, base: Path = Path()) -> str:
    """A model's directory: a path from `base`, or where there is none an embedded model or one in the hub's cache.

    Raises InvalidField, naming `field`, for a model of the hub that is not in the cache.
    """
    try:
        return model_directory(model, base)
    except NotAllowed as error:
        raise InvalidField(field, model, str(error)) from error
