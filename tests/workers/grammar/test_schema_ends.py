"""A schema whose values must contain themselves is refused; one with a way out is not."""

from __future__ import annotations

from typing import Any

import pytest

from gemray_workers.errors import InvalidField
from gemray_workers.grammar.schema_ends import check_ends

_ITSELF = {"$ref": "#"}
_NODE = {"type": "object", "properties": {"a": _ITSELF}}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({**_NODE, "required": ["a"]}, ""),
        ({"type": "object", "required": ["b"], "additionalProperties": _ITSELF}, ""),
        ({"type": "array", "items": _ITSELF, "minItems": 1}, ""),
        ({"type": "array", "prefixItems": [{"type": "null"}, _ITSELF], "minItems": 2}, ""),
        ({"type": "array", "prefixItems": [{"type": "null"}], "items": _ITSELF, "minItems": 2}, ""),
        ({"$ref": "#"}, ""),
        ({"anyOf": [{"type": "array", "items": _ITSELF, "minItems": 1}, {**_NODE, "required": ["a"]}]}, ""),
        ({"allOf": [{"type": "object"}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"$ref": "#/$defs/y"}, "y":
          {"type": ["object"], "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"]}}}, "#/$defs/x"),
    ],
)  # fmt: skip
def test_without_an_end(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidField, match="without an end") as caught:
        check_ends("structured.json_schema", schema)
    assert caught.value.field == f"structured.json_schema{place}"


@pytest.mark.parametrize(
    "schema",
    [
        _NODE,
        {},
        {**_NODE, "type": ["object", "null"], "required": ["a"]},
        {**_NODE, "required": ["a"], "type": ["object", "array"]},
        {**_NODE, "properties": {"a": {"anyOf": [{"type": "null"}, _ITSELF]}}, "required": ["a"]},
        {"type": "array", "items": _ITSELF},
        {"type": "array", "prefixItems": [{"type": "null"}], "items": _ITSELF, "minItems": 1},
        {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "string"}],
         "$defs": {"list": {"type": "array", "items": _ITSELF, "minItems": 1}}},
        {"$ref": "http://example.com/elsewhere"},
        {"$ref": "#/$defs/none"},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
    ],
)  # fmt: skip
def test_with_an_end(schema: dict[str, Any]) -> None:
    check_ends("structured.json_schema", schema)
