"""What a schema may hold, as llguidance would stop at it, or stop the process, if it were larger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemray_workers.errors import InvalidField, Summary
from gemray_workers.grammar.optional_parts import check_optional_parts
from gemray_workers.grammar.schema_tree import Link, Schema, escaped, links

MAX_SCHEMA_DEPTH = 512
"""Schemas one inside the other, where a reference counts as what it names; a schema in itself counts once."""
MAX_PROPERTIES = 1000
"""Properties of one object that need not be there, those of alternatives and of `allOf` together."""
LEAST_INTEGER, MOST_INTEGER = -(1 << 63), (1 << 64) - 1


def check_values(field: str, schema: Schema) -> None:
    """Raise InvalidField for an integer, a text or an expression anywhere in a schema that llguidance can't read, or
    not soon."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        pointer, value = waiting.pop()
        place = f"{field}#{pointer}"
        if isinstance(value, dict):
            for name in value:
                _check_text(place, name)
            _check_patterns(place, value)
            waiting += [(f"{pointer}/{escaped(name)}", inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{pointer}/{index}", inner) for index, inner in enumerate(value)]
        elif isinstance(value, str):
            _check_text(place, value)
        elif isinstance(value, int) and not LEAST_INTEGER <= value <= MOST_INTEGER:
            raise InvalidField(place, value, f"an integer from {LEAST_INTEGER} to {MOST_INTEGER}")


def _check_patterns(place: str, schema: Schema) -> None:
    """Look at those of its text and of its properties' names, if the object is a schema."""
    if isinstance(pattern := schema.get("pattern"), str):
        check_optional_parts(f"{place}/pattern", pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        for pattern in patterns:
            check_optional_parts(f"{place}/patternProperties", pattern)


def _check_text(place: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        allowed = "text without lone surrogates (\\ud800 to \\udfff)"
        raise InvalidField(place, Summary.of_text(text), allowed) from None


def check_sizes(field: str, root: Schema) -> None:
    """Raise InvalidField for a schema that is too deep, or has too many properties, once references are followed.

    Without recursion: references may lead through as many schemas as the text has room for.
    """
    heights: dict[int, int] = {}
    optional: dict[int, int] = {}
    places = {id(root): ""}
    links_of = {id(root): list(links(root, root))}
    path: list[tuple[Schema, Iterator[Link]]] = [(root, iter(links_of[id(root)]))]
    while path:
        schema, left = path[-1]
        key = id(schema)
        link = next(left, None)
        if link is not None:
            inner = id(link.schema)
            if inner not in places:
                places[inner] = link.place_from(places[key])
                links_of[inner] = list(links(root, link.schema))
                path.append((link.schema, iter(links_of[inner])))
            continue
        path.pop()  # what it leads to is known, but for what leads back to it
        place = f"{field}#{places[key]}" if places[key] else field
        heights[key] = 1 + max((heights.get(id(link.schema), 0) for link in links_of[key]), default=0)
        if heights[key] > MAX_SCHEMA_DEPTH:
            value = Summary(f"more than {MAX_SCHEMA_DEPTH} schemas one inside the other, references followed")
            raise InvalidField(place, value, f"at most {MAX_SCHEMA_DEPTH}")
        in_place = (optional.get(id(link.schema), 0) for link in links_of[key] if link.is_in_place)
        optional[key] = _num_optional(schema) + sum(in_place)
        if optional[key] > MAX_PROPERTIES:
            value = Summary(f"{optional[key]} properties that are not required")
            raise InvalidField(place, value, f"at most {MAX_PROPERTIES} of an object, its alternatives together")


def _num_optional(schema: Schema) -> int:
    properties, required = schema.get("properties"), schema.get("required")
    names = set(properties) if isinstance(properties, dict) else set[str]()
    return len(names - set(map(str, required))) if isinstance(required, list) else len(names)
