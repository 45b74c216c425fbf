"""Numbers that flags take: each states its bounds once, for the help text and for what a wrong one is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import typer

N = TypeVar("N", int, float)

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1
"""The protocol's integers; larger ones would not fit a message."""
_SHOWN = 40
"""Characters of a text that an error shows."""


class InvalidNumber(Exception):
    """A flag was given something else than a number within its bounds.

    No ValueError, of which typer would make a message of its own.

    Attributes:
        field: the flag's name, with underscores.
        value: a number as it was typed, or a text in quotes.
        allowed: what would have been accepted, in words.
    """

    def __init__(self, field: str, value: str, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field} = {value} is not allowed: {allowed}")


@dataclass(frozen=True)
class Bounds(Generic[N]):
    """The numbers from `least` to `most`."""

    kind: Callable[[str], N]
    """int or float."""
    least: N
    most: N | None = None
    """None for no upper limit."""
    excludes_least: bool = False
    noun: str = "an integer"
    """What the number is, in words."""

    def __contains__(self, value: N) -> bool:
        """Whether it lies within; NaN and infinity lie nowhere."""
        above = value > self.least if self.excludes_least else value >= self.least
        return above and (value < math.inf if self.most is None else value <= self.most)

    def __str__(self) -> str:
        """The bounds as help texts tell them, those of `gemray serve` too: ``>= 1``, ``0..20``, ``> 0 and <= 1``."""
        if self.most is None or self.excludes_least:
            least = f"{'>' if self.excludes_least else '>='} {self.least}"
            return least if self.most is None else f"{least} and <= {self.most}"
        return f"{self.least}..{self.most}"

    def read(self, name: str, text: object) -> N:
        """The number of a flag's text, or its default; raises InvalidNumber."""
        typed = str(text).strip()
        shown = typed if len(typed) <= _SHOWN else f"{typed[:_SHOWN]}..."
        allowed = f"{self.noun} {self}"
        try:
            value = self.kind(typed)
        except ValueError:
            raise InvalidNumber(name, repr(shown), allowed) from None
        if value not in self:
            raise InvalidNumber(name, shown, allowed)
        return value


def integer(name: str, meaning: str, *, least: int, most: int | None = None, metavar: str = "INTEGER") -> Any:
    """A flag that takes an integer; the help text ends with its bounds."""
    return _option(name, meaning, Bounds(int, least, most), metavar)


def number(name: str, meaning: str, *, least: float, most: float | None = None, excludes_least: bool = False) -> Any:
    """A flag that takes a number; the help text ends with its bounds."""
    return _option(name, meaning, Bounds(float, least, most, excludes_least, "a number"), "NUMBER")


def seconds(name: str, meaning: str, *, excludes_least: bool = True) -> Any:
    """A flag that takes a duration above 0, or with `excludes_least` False from 0 on."""
    return _option(name, meaning, Bounds(float, 0, None, excludes_least, "seconds"), "SECONDS")


def _option(name: str, meaning: str, bounds: Bounds[Any], metavar: str) -> Any:
    def parse(text: object) -> Any:
        return bounds.read(name, text)

    flag = "--" + name.replace("_", "-")
    return typer.Option(flag, parser=parse, metavar=metavar, help=f"{meaning.removesuffix('.')}; {bounds}.")
