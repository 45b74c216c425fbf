"""Names in the tables of a suite's file: those of a dataclass's fields, all that have no default, with values of their
kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gemray_workers.errors import InvalidField


def check_names(cls: type[Any], values: Mapping[str, Any], origin: str, *, table: str = "") -> None:
    """Raise InvalidField for a name that `cls` does not have, one that is missing, or a value of another kind.

    Args:
        cls: the dataclass that is made of the table.
        values: the table.
        origin: the file, as the error says it.
        table: what stands before its names in the error, such as ``load.``.
    """
    known = {field.name: field for field in fields(cls)}
    for name in values:
        if name not in known:
            raise InvalidField(f"{table}{name}", values[name], f"one of {', '.join(known)} (in {origin})")
    for name, field in known.items():
        if field.default is MISSING and name not in values:
            raise InvalidField(f"{table}{name}", None, f"set (in {origin})")
    hints = get_type_hints(cls)
    for name, value in values.items():
        if not _is_of(hints[name], value):
            raise InvalidField(f"{table}{name}", value, f"{_in_words(hints[name])} (in {origin})")


_KINDS: Mapping[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a finite number"),
    str: ((str,), "a text"),
}


def _is_of(hint: Any, value: Any) -> bool:
    """Whether a field takes a value, as far as its kind goes; tables in it have checks of their own."""
    if get_origin(hint) is UnionType:
        return any(_is_of(part, value) for part in get_args(hint))
    if hint is NoneType:
        return value is None
    if get_origin(hint) is tuple:
        entries = value if isinstance(value, list | tuple) else [value]
        return all(_is_of(get_args(hint)[0], entry) for entry in entries)
    kinds, _ = _KINDS.get(_plain(hint), ((object,), ""))
    if isinstance(value, float) and not math.isfinite(value):  # which TOML can write
        return object in kinds
    return isinstance(value, kinds) and (bool in kinds or object in kinds or not isinstance(value, bool))


def _in_words(hint: Any) -> str:
    if get_origin(hint) is UnionType:
        return _in_words(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return f"{_in_words(get_args(hint)[0])}, or a list of them"
    return _KINDS[_plain(hint)][1]


def _plain(hint: Any) -> Any:
    return str if get_origin(hint) is Literal else hint
