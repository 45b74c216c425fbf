"""Flags that several commands share."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from gemray_cluster.settings.errors import flag_of
from gemray_cluster.settings.settings import ServeSettings, settings_of
from gemray_cluster.settings.sources import CONFIG, unknown_variables
from gemray_cluster.settings.types import SWITCH


def with_settings(command: Callable[[dict[str, str | None]], None]) -> Callable[..., None]:
    """Give a command one flag a setting of `ServeSettings`, and hand it the texts as typed."""

    def run(**flags: str | bool | list[str] | None) -> None:
        command({name: _text(value) for name, value in flags.items()})

    parameters = list(_flags())
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _text(value: str | bool | list[str] | None) -> str | None:
    if isinstance(value, list):
        return ",".join(value) if value else None
    return str(value).lower() if isinstance(value, bool) else value


def load_settings(flags: dict[str, str | None]) -> ServeSettings:
    """Settings from flags, variables and the file; a variable that may be a misspelt setting is told on stderr."""
    for name, meant in unknown_variables(os.environ, settings_of(ServeSettings)).items():
        hint = "" if meant is None else f"; did you mean {meant}?"
        print(f"warning: {name} is no setting of gemray and does nothing{hint}", file=sys.stderr)
    return ServeSettings.load(flags, os.environ)


def _flags() -> Iterable[inspect.Parameter]:
    for setting in settings_of(ServeSettings):
        kind, flag = setting.metadata["kind"], flag_of(setting.name)
        texts = {"help": escape(setting.metadata["help"]), "rich_help_panel": setting.metadata["panel"]}
        if kind is SWITCH:
            flag = f"{flag}/--no{flag[1:]}" if setting.default else flag
            yield _parameter(setting.name, typer.Option(flag, **texts), bool)
        else:
            option = typer.Option(flag, metavar=kind.metavar, **texts)
            yield _parameter(setting.name, option, list[str] if kind.repeats else str)
    config = typer.Option("--config", metavar="FILE", help="TOML file with any of these settings.")
    yield _parameter(CONFIG, config, str)


def escape(text: str) -> str:
    """The text of a help, in which rich reads words in brackets as its markup."""
    return re.sub(r"(\[[a-z#/@])", r"\\\1", text)


def _parameter(name: str, option: Any, kind: type[str | bool | list[str]]) -> inspect.Parameter:
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
