"""The schemas of a JSON schema: which ones stand in one, and which ones it refers to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords that hold schemas by name."""
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMAS = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains")
"""Keywords that hold one."""
_DEFINITIONS = ("/$defs/", "/definitions/")
_IN_PLACE = ("/anyOf/", "/oneOf/", "/allOf/")

Schema = dict[str, Any]


@dataclass(frozen=True)
class Link:
    """From a schema to another that it is compiled with."""

    pointer: str
    """From the root for a reference, else from the schema."""
    schema: Schema
    is_reference: bool

    @property
    def is_in_place(self) -> bool:
        """Whether both speak of the same value."""
        return self.is_reference or self.pointer.startswith(_IN_PLACE)

    def place_from(self, place: str) -> str:
        """The pointer from the root, if the schema of the link's beginning stands at `place`."""
        return self.pointer if self.is_reference else place + self.pointer


def parts(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """(step of a JSON pointer, schema) of the schemas that stand in one."""
    for key in MAPS:
        if isinstance(schema.get(key), dict):
            for name, child in schema[key].items():
                if isinstance(child, dict):
                    yield f"/{key}/{escaped(name)}", child
    for key in LISTS:
        if isinstance(schema.get(key), list):
            for index, child in enumerate(schema[key]):
                if isinstance(child, dict):
                    yield f"/{key}/{index}", child
    for key in SCHEMAS:
        if isinstance(schema.get(key), dict):
            yield f"/{key}", schema[key]


def escaped(name: str) -> str:
    """A name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def target_of(root: Schema, reference: object) -> tuple[str, Schema] | None:
    """(JSON pointer, schema) that a reference names; None where it names no object of this document."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    part: Any = root
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isascii() and name.isdigit() and int(name[:9]) < len(part):
            part = part[int(name[:9])]
        else:
            return None
    return (reference[1:], part) if isinstance(part, dict) else None


def links(root: Schema, schema: Schema) -> Iterator[Link]:
    """The schemas that one is compiled with: definitions only where they are referred to."""
    target = target_of(root, schema.get("$ref"))
    if target is not None:
        yield Link(target[0], target[1], is_reference=True)
    for step, child in parts(schema):
        if not step.startswith(_DEFINITIONS):
            yield Link(step, child, is_reference=False)
