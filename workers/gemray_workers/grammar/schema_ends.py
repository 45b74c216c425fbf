"""Whether a schema's values come to an end: none that must contain itself can be written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from gemray_workers.errors import InvalidField, Summary
from gemray_workers.grammar.schema_tree import Schema, links, target_of

_SCALARS = ("string", "number", "integer", "boolean", "null")


def check_ends(field: str, root: Schema) -> None:
    """Raise InvalidField for a schema all of whose values would contain themselves without an end."""
    places, found = {id(root): ""}, [root]
    users: defaultdict[int, list[Schema]] = defaultdict(list)
    for schema in found:  # grows as it is walked
        for link in links(root, schema):
            users[id(link.schema)].append(schema)
            if id(link.schema) not in places:
                places[id(link.schema)] = link.place_from(places[id(schema)])
                found.append(link.schema)
    ending = _ending(root, found, users)
    if id(root) in ending:
        return
    endless, seen = root, set[int]()
    while id(endless) not in seen:  # the first schema on the way that comes back to itself
        seen.add(id(endless))
        endless = next((link.schema for link in links(root, endless) if id(link.schema) not in ending), endless)
    place = f"{field}#{places[id(endless)]}" if places[id(endless)] else field
    value = Summary("a schema whose values contain themselves without an end")
    raise InvalidField(place, value, "one with an end: an optional property, null, an empty array")


def _ending(root: Schema, found: list[Schema], users: defaultdict[int, list[Schema]]) -> set[int]:
    """Those that some finite value has, as far as references and what must be there tell."""
    ending: set[int] = set()
    waiting = found[:]
    while waiting:
        schema = waiting.pop()
        if id(schema) not in ending and _ends(root, schema, ending):
            ending.add(id(schema))
            waiting += users[id(schema)]
    return ending


def _ends(root: Schema, schema: Schema, ending: set[int]) -> bool:
    def end(inner: Any) -> bool:
        return not isinstance(inner, dict) or id(inner) in ending

    target = target_of(root, schema.get("$ref"))
    if target is not None and not end(target[1]):
        return False
    if not all(map(end, _listed(schema, "allOf"))):
        return False
    for keyword in ("anyOf", "oneOf"):
        choices = _listed(schema, keyword)
        if choices and not any(map(end, choices)):
            return False
    if "const" in schema or "enum" in schema:
        return True
    stated = schema.get("type")
    kinds = stated if isinstance(stated, list) else [stated]
    # Compared and not looked up: what stands in a faulty schema need not have a hash.
    if stated is None or any(kind in _SCALARS for kind in kinds):
        return True
    has_object = "object" in kinds and all(map(end, _members(schema)))
    has_array = "array" in kinds and all(map(end, _items(schema)))
    return has_object or has_array or not ("object" in kinds or "array" in kinds)


def _listed(schema: Schema, keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _members(schema: Schema) -> Iterator[Any]:
    """Schemas of the properties that must be there."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    others = None if isinstance(schema.get("patternProperties"), dict) else schema.get("additionalProperties")
    for name in map(str, _listed(schema, "required")):
        yield properties.get(name, others)


def _items(schema: Schema) -> Iterator[Any]:
    """Schemas of the items that must be there."""
    least = schema.get("minItems")
    if not isinstance(least, int):
        return
    firsts = _listed(schema, "prefixItems")
    yield from firsts[:least]
    if least > len(firsts):
        yield schema.get("items")
