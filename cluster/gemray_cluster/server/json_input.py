"""JSON inside a request, which `limits` bounds: not too deep, and nothing that a template or tokenizer cannot take."""

from __future__ import annotations

import json
import math
import sys
from typing import Any, NoReturn

from gemray_workers.errors import InvalidField, Summary

MAX_JSON_DEPTH = 64
"""Templates and their filters recurse."""


def read_json(field: str, text: str, what: str) -> Any:
    """The value that `text` holds; raises InvalidField, which calls what is allowed `what`."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer)
    except ValueError as error:
        raise InvalidField(field, Summary.of_text(text), f"{what} ({error})") from error
    except RecursionError:
        raise InvalidField(field, Summary.of_text(text), f"nested at most {MAX_JSON_DEPTH} deep") from None
    return value


def check_content(field: str, text: str, value: dict[str, Any] | list[Any]) -> None:
    """Raise InvalidField for what is nested too deeply or is no Unicode text; `text` is what `value` was read from.

    Level by level, as what is nested deeply must not be walked by recursion.
    """
    level: list[Any] = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    for _ in range(MAX_JSON_DEPTH):
        inner: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                inner += [*entry.keys(), *entry.values()]
            elif isinstance(entry, list):
                inner += entry
            elif isinstance(entry, str) and not _is_unicode(entry):
                raise InvalidField(field, Summary.of_text(text), "text without lone surrogates (\\ud800 to \\udfff)")
        level = inner
        if not level:
            return
    raise InvalidField(field, Summary.of_text(text), f"nested at most {MAX_JSON_DEPTH} deep")


def read_object(field: str, text: str) -> dict[str, Any]:
    """A JSON object; raises InvalidField."""
    value = read_json(field, text, "a JSON object")
    if not isinstance(value, dict):
        raise InvalidField(field, Summary.of_text(text), "a JSON object")
    check_content(field, text, value)
    return value


def _is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8; JSON's escapes can make others."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is beyond a number's range")
    return value


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:  # Python takes no more, and advises to change that
        most = sys.get_int_max_str_digits()
        raise ValueError(f"an integer of {len(digits.lstrip('-'))} digits, at most {most} are read") from None
