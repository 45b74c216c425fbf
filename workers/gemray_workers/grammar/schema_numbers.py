"""Numbers of a schema that llguidance, which computes with doubles, would change: refused, or stated otherwise."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

from gemray_workers.errors import InvalidField, Summary
from gemray_workers.grammar.schema_tree import escaped

MOST_EXACT = 1 << 53
"""Up to here doubles hold every integer."""
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
BOUNDS = (*LOWER, *UPPER)
_VALUES = frozenset({"const", "enum", "multipleOf"})


def check_numbers(field: str, schema: dict[str, Any]) -> None:
    """Raise InvalidField for an integer that a schema holds answers to and doubles don't, and for what is no number."""
    waiting: list[tuple[str, Any, str | None]] = [("", schema, None)]
    while waiting:
        pointer, value, held_by = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{pointer}/{escaped(name)}", inner, _holder(name, held_by)) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{pointer}/{index}", inner, held_by) for index, inner in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            raise InvalidField(f"{field}#{pointer}", Summary(str(value)), "a finite number within a double's range")
        elif (
            held_by is not None
            and isinstance(value, int)
            and abs(value) > MOST_EXACT
            # Bounds behind all integers that doubles hold, such as those of 64-bit types, are drawn in.
            and held_by not in (LOWER if value < 0 else UPPER)
        ):
            raise InvalidField(f"{field}#{pointer}", value, f"an integer from {-MOST_EXACT} to {MOST_EXACT}")


def _holder(name: str, held_by: str | None) -> str | None:
    """The keyword that holds answers to what lies under `name`; what is in a constant is part of it."""
    if held_by in _VALUES:
        return held_by
    return name if name in _VALUES or name in BOUNDS else held_by


def draw_in(schema: dict[str, Any]) -> dict[str, Any]:
    """Bounds behind all integers that doubles hold, drawn in to the last of them."""
    far = {key: schema[key] for key in BOUNDS if type(schema.get(key)) is int and abs(schema[key]) > MOST_EXACT}
    return schema | {key: MOST_EXACT if value > 0 else -MOST_EXACT for key, value in far.items()}


def widen_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """The same numbers by bounds half a step from the outermost multiples.

    llguidance rounds bounds to multiples of `multipleOf` in doubles, where 3 times 0.1 is above 0.3. Steps of whole
    numbers are left as they are.
    """
    step: Any = schema.get("multipleOf")
    bounds = {key: schema[key] for key in BOUNDS if schema.get(key) is not None}
    numbers = [step, *bounds.values()]
    if not bounds or not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        return schema
    if step <= 0 or float(step).is_integer():
        return schema
    width = _exact(step)
    half = Fraction(1, 2)
    lows = [math.ceil(_exact(bounds[key]) / width) for key in ("minimum",) if key in bounds]
    lows += [math.floor(_exact(bounds[key]) / width) + 1 for key in ("exclusiveMinimum",) if key in bounds]
    highs = [math.floor(_exact(bounds[key]) / width) for key in ("maximum",) if key in bounds]
    highs += [math.ceil(_exact(bounds[key]) / width) - 1 for key in ("exclusiveMaximum",) if key in bounds]
    if lows and highs and max(lows) > min(highs):
        return schema  # none at all, which llguidance tells
    widened = {key: value for key, value in schema.items() if key not in BOUNDS}
    if lows and highs and max(lows) == min(highs):
        only = float(max(lows) * width)
        return {key: value for key, value in widened.items() if key != "multipleOf"} | {
            "minimum": only,
            "maximum": only,
        }
    if lows:
        widened["minimum"] = float((max(lows) - half) * width)
    if highs:
        widened["maximum"] = float((min(highs) + half) * width)
    return widened


def widen_all(schema: Any) -> Any:
    """A JSON value with the bounds of each schema in it drawn in and widened; constants and enums stay as they are."""
    if isinstance(schema, list):
        return [widen_all(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    inside = {key: inner if key in ("const", "enum") else widen_all(inner) for key, inner in schema.items()}
    return widen_bounds(draw_in(inside))


def is_multiple(value: float, step: float) -> bool:
    """Whether a number is a multiple of a step, both as they are written."""
    return (_exact(value) / _exact(step)).denominator == 1


def _exact(number: float) -> Fraction:
    """The number as its shortest decimal, which is how it was written."""
    return Fraction(Decimal(repr(number)))
