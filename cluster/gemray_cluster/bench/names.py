"""Names in the tables of a suite's file: those of a dataclass's fields, and all that have no default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from gemray_workers.errors import InvalidField


def check_names(cls: type[Any], values: Mapping[str, Any], origin: str, *, table: str = "") -> None:
    """Raise InvalidField for a name that `cls` does not have, or one that is missing.

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
