"""Where settings come from: flags, variables and a TOML file, each a text by setting, with its origin for errors."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import Field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gemray_cluster.settings.errors import PREFIX, InvalidSetting, flag_of
from gemray_cluster.settings.types import Kind, NotAllowed

CONFIG = "config"
"""The file's own setting: only a flag or a variable can name it."""
SIMILAR = 0.75
"""How alike two names must be, as `difflib` measures it, for one to be a likely misspelling of the other."""
Settings = Sequence[Field[Any]]
Texts = dict[str, tuple[str, str]]
"""(text, origin) by setting."""


def from_flags(flags: Mapping[str, str | None]) -> Texts:
    """What was typed, by setting; None where a flag was not given."""
    return {name: (text, f"flag {flag_of(name)}") for name, text in flags.items() if text is not None}


def from_environment(environment: Mapping[str, str], settings: Settings) -> Texts:
    """The variables that name a setting, or the file."""
    names = {CONFIG, *(setting.name for setting in settings)}
    variables = {name: PREFIX + name.upper() for name in names}
    return {name: (environment[key], f"environment {key}") for name, key in variables.items() if key in environment}


def unknown_variables(environment: Mapping[str, str], settings: Settings) -> dict[str, str | None]:
    """Variables with a setting's prefix that name no setting, each with the variable that was probably meant, if any.

    They are no errors: Kubernetes and users' own scripts set such variables too.
    """
    known = [name.upper() for name in (CONFIG, *(setting.name for setting in settings))]
    found = {}
    for variable in sorted(name for name in environment if name.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX)
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=SIMILAR)
            found[variable] = PREFIX + near[0] if near else None
    return found


def from_file(path: str, origin: str, settings: Settings) -> Texts:
    """The settings of a TOML file. Raises InvalidSetting, naming the file."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSetting(CONFIG, path, f"a readable file ({error.strerror})", origin) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(CONFIG, path, f"a TOML file ({error})", origin) from error
    names = [setting.name for setting in settings]
    repeats = {setting.name for setting in settings if setting.metadata["kind"].repeats}
    for name, value in content.items():
        if name not in names:
            near = get_close_matches(name, names, n=1, cutoff=SIMILAR)
            hint = f"perhaps {near[0]} is meant; " if near else ""
            raise InvalidSetting(name, value, f"{hint}one of {', '.join(names)}", path)
        if name in repeats and isinstance(value, list) and all(isinstance(text, str) for text in value):
            content[name] = ",".join(value)
        elif not isinstance(value, str | int | float):
            raise InvalidSetting(name, value, "a string or a number", path)
    return {name: (str(value), path) for name, value in content.items()}


def parse(setting: Field[Any], text: str, origin: str) -> Any:
    """The value of a text. Raises InvalidSetting."""
    kind: Kind[Any] = setting.metadata["kind"]
    try:
        return kind.parse(text)
    except ValueError as error:
        allowed = str(error) if isinstance(error, NotAllowed) else kind.allowed
        if origin.startswith("environment") and text.startswith("tcp://"):
            allowed += " (Kubernetes sets this variable for a Service named gemray: use enableServiceLinks: false)"
        raise InvalidSetting(setting.name, text, allowed, origin) from error
