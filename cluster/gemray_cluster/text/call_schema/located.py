"""Schemas with the place at which they stand in a request, which is what errors name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from gemray_workers.errors import InvalidField, Summary

_PLAIN_STEP = re.compile(r"[\w$-]{1,64}")
_MAX_STEP_CHARS = 64


@dataclass(frozen=True)
class Located:
    """A schema and its place; equal where the places are."""

    schema: Any = field(compare=False)
    path: str
    """As `chat.tools_json[0].function.parameters.properties.city`."""

    def place_of(self, *steps: str | int) -> str:
        """The place of something inside."""
        return self.path + "".join(map(_written, steps))

    def at(self, *steps: str | int) -> Located:
        """The schema at a place inside that is known to be there."""
        schema = self.schema
        for step in steps:
            schema = schema[step]
        return Located(schema, self.place_of(*steps))


Conjunction = tuple[Located, ...]
"""Schemas that hold at once; none of them: anything is allowed."""


def target_of(reference: str, root: Located, at: str) -> Located:
    """The schema that a reference names; raises InvalidField with the place `at` of the reference."""
    head, *steps = reference.split("/")
    part, path = root.schema, root
    for step in steps:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        key: str | int = int(name) if isinstance(part, list) and re.fullmatch(r"\d{1,9}", name, re.ASCII) else name
        is_there = key in part if isinstance(part, dict) else isinstance(key, int) and key < len(part)
        if head != "#" or not is_there:
            break
        part, path = part[key], path.at(key)
    else:
        if head == "#" and isinstance(part, dict | bool):
            return path
    raise InvalidField(at, Summary.of_text(reference), "a reference to a schema within the parameters: #/$defs/NAME")


def shown(value: object) -> Summary:
    """A value of a schema, as JSON, cut where it is long."""
    return Summary.of_text(value) if isinstance(value, str) else Summary(_cut(json.dumps(value, ensure_ascii=False)))


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _written(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    if _PLAIN_STEP.fullmatch(step):
        return f".{step}"
    cut = step if len(step) <= _MAX_STEP_CHARS else f"{step[:_MAX_STEP_CHARS]}..."
    return f"[{json.dumps(cut, ensure_ascii=False)}]"
