"""Typed reading of a config.json that no library has checked: what is missing or mistyped is named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from gemray_workers.errors import InvalidField


class JsonFields:
    """The fields of one JSON object. An optional field may be absent or null, which say the same."""

    def __init__(self, owner: str, fields: Mapping[str, Any]) -> None:
        """Fields of `owner`, which stands before each field's name in errors."""
        self._owner = owner
        self._fields = fields

    def refusal(self, name: str, allowed: str) -> InvalidField:
        """The error that says that the value of `name` is none of the allowed ones."""
        return InvalidField(f"{self._owner} {name}", self._fields.get(name), allowed)

    def has(self, name: str) -> bool:
        """Whether the field has a value."""
        return self._fields.get(name) is not None

    def integer(self, name: str, *, least: int = 1, most: int | None = None) -> int:
        """A required integer within bounds.

        Raises:
            InvalidField: something else, or nothing.
        """
        value = self._fields.get(name)
        if not _is_integer(value) or value < least or (most is not None and value > most):
            raise self.refusal(name, f"an integer >= {least}" if most is None else f"an integer, {least} to {most}")
        return value

    def integers(self, name: str) -> list[int]:
        """A required list of integers.

        Raises:
            InvalidField: something else, or nothing.
        """
        values = self._fields.get(name)
        if not isinstance(values, list) or not all(_is_integer(value) for value in values):
            raise self.refusal(name, "a list of integers")
        return values

    def names(self, name: str) -> list[str]:
        """A required list of strings.

        Raises:
            InvalidField: something else, or nothing.
        """
        values = self._fields.get(name)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.refusal(name, "a list of names")
        return values

    def number(self, name: str, *, positive: bool = False) -> float:
        """A required number.

        Raises:
            InvalidField: something else, or nothing.
        """
        value = self._fields.get(name)
        try:
            number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or (positive and number <= 0):
            raise self.refusal(name, "a number > 0" if positive else "a finite number")
        return number

    def optional_number(self, name: str, *, positive: bool = False) -> float | None:
        """A number, or None where the field has no value.

        Raises:
            InvalidField: something else.
        """
        return self.number(name, positive=positive) if self.has(name) else None

    def optional_boolean(self, name: str) -> bool | None:
        """True or false, or None where the field has no value.

        Raises:
            InvalidField: something else.
        """
        value = self._fields.get(name)
        if not isinstance(value, bool | None):
            raise self.refusal(name, "true or false")
        return value

    def optional_object(self, name: str) -> JsonFields:
        """An object's fields, none where the field is absent or null.

        Raises:
            InvalidField: something else.
        """
        value = self._fields.get(name)
        if not isinstance(value, dict | None):
            raise self.refusal(name, "an object")
        return JsonFields(f"{self._owner} {name}", value or {})

    def one_of(self, name: str, *allowed: object) -> None:
        """Check a field that gemray computes for some values alone.

        Raises:
            InvalidField: another value.
        """
        # By type too: JSON's false is not its 0.
        if not any(
            type(self._fields.get(name)) is type(value) and self._fields.get(name) == value for value in allowed
        ):
            raise self.refusal(name, "one of " + ", ".join(map(repr, allowed)))


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
