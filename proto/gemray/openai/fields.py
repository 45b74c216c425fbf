"""JSON objects of a request, read field by field: what is of another type, or unknown, is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any

from gemray.openai.errors import HttpError, bad_field
from gemray.openai.lists import check_length

INT32 = (-(2**31), 2**31 - 1)
UINT32 = (0, 2**32 - 1)
UINT64 = (0, 2**64 - 1)
"""What the protocol's integers hold."""
SIMILAR = 0.75
"""Likeness of two names from which on the one may stand for the other."""
MAX_NAME_CHARS = 64
"""Most characters of a name that is compared with others: it may be as long as a body."""


class Fields:
    """An object of a request. null is as if the field were not there."""

    def __init__(self, values: object, path: str = "") -> None:
        """`path` names the object in errors; the request's own is "". Raises HttpError for what is no object."""
        if not isinstance(values, dict):
            raise bad_field(path or "body", values, "a JSON object")
        self._values: dict[str, Any] = values
        self._path = path
        self.known: set[str] = set()
        """Names that have been asked for."""

    @property
    def names(self) -> list[str]:
        """Names of the fields that are there."""
        return [name for name, value in self._values.items() if value is not None]

    def name_of(self, name: str) -> str:
        """A field's name as the request has it, with what it lies in."""
        return f"{self._path}.{name}" if self._path else name

    def refusal(self, name: str, allowed: str) -> HttpError:
        """The error of a field that has a value which is not allowed."""
        return bad_field(self.name_of(name), self._values.get(name), allowed)

    def any(self, name: str) -> Any:
        """A field of whatever type; None when it is not there."""
        self.known.add(name)
        return self._values.get(name)

    def text(self, name: str, *, among: Collection[str] = ()) -> str | None:
        """A string, which may have to be one of several; raises HttpError."""
        value: str | None = self._typed(name, lambda value: isinstance(value, str), "a string")
        if value is not None:
            check_text(self.name_of(name), value)
        if value is not None and among and value not in among:
            raise self.refusal(name, "one of " + ", ".join(among))
        return value

    def boolean(self, name: str) -> bool | None:
        """True or false; raises HttpError."""
        value: bool | None = self._typed(name, lambda value: isinstance(value, bool), "true or false")
        return value

    def integer(self, name: str, limits: tuple[int, int] = INT32) -> int | None:
        """An integer within limits, both included; raises HttpError. 5.0 is one, as JavaScript writes no other."""
        value = self._typed(name, lambda value: is_number(value) and value == value // 1, "an integer")
        least, most = limits
        if value is not None and not least <= value <= most:
            # The least that a signed field holds is no advice to who gave too much: hardly a negative number is meant.
            bound = f">= {least}" if value < least else f"<= {most}"
            raise self.refusal(name, f"an integer from {least} to {most}" if least == 0 else f"an integer {bound}")
        return None if value is None else int(value)

    def number(self, name: str) -> float | None:
        """A number; raises HttpError."""
        value = self._typed(name, is_number, "a number")
        return None if value is None else float(value)

    def array(self, name: str) -> list[Any] | None:
        """An array of no more entries than it may have; raises HttpError."""
        value: list[Any] | None = self._typed(name, lambda value: isinstance(value, list), "an array")
        if value is not None:
            check_length(name, self.name_of(name), value)
        return value

    def object(self, name: str) -> Fields | None:
        """An object; raises HttpError."""
        value = self.any(name)
        return None if value is None else Fields(value, self.name_of(name))

    def required(self, name: str) -> Any:
        """A field of whatever type that must be there; raises HttpError."""
        value = self.any(name)
        if value is None:
            raise HttpError(400, f"{self.name_of(name)} is missing", param=self.name_of(name))
        return value

    def end(self, *, without_effect: Collection[str] = ()) -> None:
        """Raise HttpError for a field that nobody has read, unless it changes no answer."""
        for name, value in self._values.items():
            if value is None or name in self.known or name in without_effect:
                continue
            param = self.name_of(name)
            near = get_close_matches(name[:MAX_NAME_CHARS], self.known, n=1, cutoff=SIMILAR)
            hint = f"; did you mean {self.name_of(near[0])}?" if near else ""
            raise HttpError(400, f"{param} is not supported here{hint}", param=param, code="unsupported_parameter")

    def _typed(self, name: str, fits: Callable[[Any], bool], allowed: str) -> Any:
        value = self.any(name)
        if value is not None and not fits(value):
            raise self.refusal(name, allowed)
        return value


def is_number(value: object) -> bool:
    """Whether a value is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def check_text(param: str, text: str) -> str:
    """The text, if UTF-8 can hold it: JSON can spell halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_field(param, text, "text without single surrogates") from None
    return text
