"""Whether a schema is one: each keyword with a value of its type, told by its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from gemray_cluster.text.call_schema.located import Located, shown
from gemray_workers.errors import InvalidField
from gemray_workers.grammar.schema_tree import LISTS, MAPS, SCHEMAS

KINDS = ("object", "array", "string", "number", "integer", "boolean", "null")
_MAPS = (*MAPS, "dependentSchemas")
_SCHEMAS = (*SCHEMAS, "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip


def check_schema(root: Located) -> None:
    """Look at a schema and all those in it; raises InvalidField.

    null is as if a keyword were not there, but for `const`. Keywords that JSON Schema does not know say nothing.
    """
    waiting = [root]
    while waiting:
        located = waiting.pop()
        if isinstance(located.schema, bool):
            continue
        if not isinstance(located.schema, dict):
            raise InvalidField(located.path, shown(located.schema), "a JSON schema: an object, true or false")
        for keyword, (is_allowed, allowed) in _KEYWORDS.items():
            value = located.schema.get(keyword)
            if value is not None and not is_allowed(value):
                raise InvalidField(located.place_of(keyword), shown(value), allowed)
        waiting += _inner(located)


def _inner(located: Located) -> Iterator[Located]:
    for keyword in _MAPS:
        for name in located.schema.get(keyword) or ():
            yield located.at(keyword, name)
    for keyword in (*LISTS, *_SCHEMAS):
        value = located.schema.get(keyword)
        if isinstance(value, list):
            for index in range(len(value)):
                yield located.at(keyword, index)
        elif value is not None:
            yield located.at(keyword)


def is_number(value: object) -> bool:
    """Whether it is a number that a double holds, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def is_count(value: Any) -> bool:
    """Whether it is a whole number from 0 on; 3.0 is one."""
    return is_number(value) and bool(value >= 0) and bool(value == math.floor(value))


def _is_kind(value: object) -> bool:
    return isinstance(value, str) and value.lower() in KINDS  # Gemma's declarations write types in capitals


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_map(value: object) -> bool:
    return isinstance(value, dict)


def _is_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)


_KEYWORDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (
        lambda value: _is_kind(value) or (_is_list(value) and all(map(_is_kind, value))),
        f"one of {', '.join(KINDS)}, or an array of them",
    ),
    "enum": (_is_list, "an array of at least one value"),
    "required": (
        lambda value: isinstance(value, list) and all(map(_is_text, value)),
        "an array of names of properties",
    ),
    "multipleOf": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "minimum": (is_number, "a number"),
    "maximum": (is_number, "a number"),
    "exclusiveMinimum": (lambda value: is_number(value) or _is_flag(value), "a number"),
    "exclusiveMaximum": (lambda value: is_number(value) or _is_flag(value), "a number"),
    "pattern": (_is_text, "a regular expression, as a string"),
    "format": (_is_text, "the name of a format, as a string"),
    "$ref": (_is_text, "a reference, as a string"),
    "uniqueItems": (_is_flag, "true or false"),
    "nullable": (_is_flag, "true or false"),
    **dict.fromkeys(_COUNTS, (is_count, "a whole number from 0 on")),
    **dict.fromkeys(_MAPS, (_is_map, "an object of schemas by name")),
    **dict.fromkeys(LISTS, (_is_list, "an array of at least one schema")),
}
