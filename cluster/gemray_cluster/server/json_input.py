"""JSON inside a request, which `limits` bounds: not too deep, and nothing that a template or tokenizer cannot take."""

from __future__ import annotations

from typing import Any

from gemray.strict_json import JsonFault, read_strictly
from gemray_workers.errors import InvalidField, Summary

MAX_JSON_DEPTH = 64
"""Templates and their filters recurse."""


def read_json(field: str, text: str, what: str, *, names_once: bool = True) -> Any:
    """The value that `text` holds; raises InvalidField, which calls what is allowed `what`.

    With `names_once` False the last of equal names in an object counts.
    """
    try:
        return read_strictly(text, names_once=names_once)
    except JsonFault as fault:
        raise InvalidField(field, Summary.of_text(text), f"{what} (this {fault})") from None
    except RecursionError:
        raise InvalidField(field, Summary.of_text(text), f"nested at most {MAX_JSON_DEPTH} deep") from None


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


def read_object(field: str, text: str, *, names_once: bool = True) -> dict[str, Any]:
    """A JSON object; raises InvalidField. With `names_once` False the last of equal names in an object counts."""
    value = read_json(field, text, "a JSON object", names_once=names_once)
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
