"""JSON of requests, over gRPC and HTTP: what readers of JSON differ in is refused, as what is none."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from typing import Any, NoReturn

_MAX_SHOWN_CHARS = 80


class JsonFault(ValueError):
    """Text that is no JSON, or has what no field takes. Says so as "is ...", "has ..." or "names ..."."""


def read_strictly(text: str, *, names_once: bool = True) -> Any:
    """The value that `text` holds. With `names_once` False the last of equal names in an object counts.

    Raises:
        JsonFault: no JSON, a number that is none or is out of range, a name twice in one object.
        RecursionError: nested too deep.
    """
    try:
        return json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
            object_pairs_hook=_object if names_once else None,
        )
    except json.JSONDecodeError as error:
        raise JsonFault(f"is not JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise JsonFault(f"is not JSON: {name} is no number of it")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise JsonFault(f"has {digits[:_MAX_SHOWN_CHARS]}, beyond a number's range")
    return value


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:  # Python takes no more, and advises to change that
        most = sys.get_int_max_str_digits()
        raise JsonFault(f"has an integer of {len(digits.lstrip('-'))} digits, at most {most} are read") from None


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(members)
    if len(read) < len(members):  # readers of JSON differ in which one counts
        twice = next(name for name, count in Counter(name for name, _ in members).items() if count > 1)
        cut = "..." if len(twice) > _MAX_SHOWN_CHARS else ""
        raise JsonFault(f"names {json.dumps(twice[:_MAX_SHOWN_CHARS])}{cut} more than once in one object")
    return read
