"""More than 200 JSON schemas of the kinds that JSON-Schema-Test-Suite has, and what users send.

Most strings and lists have a bound, as answers must end within a test's budget; those that have none are named so.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

SHORT: Schema = {"type": "string", "maxLength": 8}
SMALL: Schema = {"type": "integer", "minimum": 0, "maximum": 99}


def of(properties: Schema, *, required: bool = True, **more: Any) -> Schema:
    """An object of these properties alone."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required else [],
        "additionalProperties": False,
        **more,
    }


def schemas() -> dict[str, Schema]:
    """By name, always the same."""
    found: dict[str, Schema] = {}
    for kind in (
        types, enums, integers, numbers, strings, patterns, formats, arrays, tuples, objects, optional, combined,
        references, recursive, unicode, large, everyday, drawn,
    ):  # fmt: skip
        for index, schema in enumerate(kind()):
            found[f"{kind.__name__} {index}"] = schema
    return found


def types() -> Iterator[Schema]:
    for name in ("null", "boolean", "integer", "number"):
        yield {"type": name}
    yield SHORT
    yield {"type": "array", "items": SMALL, "maxItems": 3}
    yield of({"a": {"type": "null"}})
    for names in (["null", "integer"], ["boolean", "null"], ["integer", "boolean"]):
        yield {"type": names}
        yield of({"a": {"type": names}, "b": {"type": names}})
    yield {"type": ["string", "null"], "maxLength": 5}


def enums() -> Iterator[Schema]:
    yield {"enum": [1, 2, 3]}
    yield {"enum": ["a", "ab", "abc"]}
    yield {"enum": [True, None, "x", 1.5]}
    yield {"enum": [{"a": 1}, {"a": [1, 2]}, []]}
    yield {"enum": ["", " ", "\n", '"', "\\", "/", "\t"]}
    yield {"enum": ["\u0000", "\u001f", "\u007f"]}
    for value in (1, -1, 0.5, "text", 'with "quotes"', None, False, [1, "a"], {"k": {"n": None}}):
        yield {"const": value}
    for size in (10, 100, 1000):
        yield of({"which": {"enum": [f"option {i}" for i in range(size)]}})
        yield {"enum": list(range(size))}
    yield {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "maxItems": 4}


def integers() -> Iterator[Schema]:
    for low, high in ((0, 0), (0, 1), (-1, 1), (5, 17), (-250, -199), (0, 255), (999, 1001), (-5, 123456)):
        yield {"type": "integer", "minimum": low, "maximum": high}
    yield {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 12}
    for step in (2, 3, 5, 10):
        yield {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": step}
    yield of({"id": {"type": "integer", "minimum": 1}})


def numbers() -> Iterator[Schema]:
    for low, high in ((0, 1), (-1.5, 1.5), (0.25, 0.75), (-100, -99.5), (3, 3), (0, 1000)):
        yield of({"x": {"type": "number", "minimum": low, "maximum": high}})
    yield of({"x": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}})
    yield {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 3}


def strings() -> Iterator[Schema]:
    for low, high in ((0, 0), (0, 1), (1, 1), (2, 4), (5, 5), (0, 20), (10, 12)):
        yield {"type": "string", "minLength": low, "maxLength": high}
        yield of({"s": {"type": "string", "minLength": low, "maxLength": high}})
    yield {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 3}, "minItems": 3, "maxItems": 3}


def patterns() -> Iterator[Schema]:
    for pattern in (
        "^a$", "^[a-z]{3}$", "^[A-Z][a-z]{1,6}$", "^(foo|bar|baz)$", "^[0-9]{4}-[0-9]{2}$", r"^\d{3}$", r"^\w{1,5}$",
        "^#[0-9a-f]{6}$", "^[^a-z]{2}$", "^a{2,3}b?$", r"^\+?[0-9]{3,5}$", "^(ab){2}$", "^[α-ω]{1,4}$", r"^v\d\.\d$",
        r"^x\.y\\z$", "^[ -~]{4}$",
    ):  # fmt: skip
        yield {"type": "string", "pattern": pattern}
    yield of({"code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}$"}, "n": SMALL})


def formats() -> Iterator[Schema]:
    for name in ("date", "time", "date-time", "uuid", "ipv4"):
        yield {"type": "string", "format": name}
        yield of({"at": {"type": "string", "format": name}})


def arrays() -> Iterator[Schema]:
    for low, high in ((0, 0), (0, 1), (1, 1), (2, 3), (4, 4)):
        yield {"type": "array", "items": SMALL, "minItems": low, "maxItems": high}
        yield {"type": "array", "items": of({"a": SMALL}), "minItems": low, "maxItems": high}
    yield {"type": "array", "items": {"type": "array", "items": SMALL, "maxItems": 2}, "minItems": 1, "maxItems": 2}
    yield {"type": "array", "items": {"anyOf": [SMALL, {"type": "null"}]}, "minItems": 2, "maxItems": 3}
    yield {"type": "array", "maxItems": 0}


def tuples() -> Iterator[Schema]:
    yield {"type": "array", "prefixItems": [SMALL, SHORT], "items": False, "minItems": 2}
    yield {"type": "array", "prefixItems": [{"const": "x"}, SMALL], "minItems": 2, "items": SMALL, "maxItems": 4}
    yield {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False}
    yield of({"point": {"type": "array", "prefixItems": [SMALL, SMALL], "items": False, "minItems": 2}})


def objects() -> Iterator[Schema]:
    yield {"type": "object", "additionalProperties": False}
    for size in (1, 2, 3, 5, 8):
        yield of({f"p{i}": SMALL for i in range(size)})
        yield of({f"p{i}": {"type": "boolean"} for i in range(size)})
    for depth in (2, 3, 5, 8):
        schema: Schema = SMALL
        for level in range(depth):
            schema = of({f"level{level}": schema})
        yield schema
    yield of({"a": SMALL, "b": of({"c": SHORT, "d": {"type": "array", "items": SMALL, "maxItems": 2}})})
    yield {"type": "object", "additionalProperties": SMALL, "maxProperties": 0}
    yield of({'quoted "key"': SMALL, "back\\slash": SMALL, "new\nline": SMALL, "": SMALL})


def optional() -> Iterator[Schema]:
    for size in (1, 2, 4):
        yield of({f"p{i}": SMALL for i in range(size)}, required=False)
        yield {**of({f"p{i}": SMALL for i in range(size)}), "required": ["p0"]}
    yield of({"a": {"type": ["integer", "null"], "minimum": 0, "maximum": 9}}, required=False)
    yield {**of({"a": SMALL, "b": of({"c": SMALL}, required=False)}), "required": ["b"]}


def combined() -> Iterator[Schema]:
    yield {"anyOf": [{"type": "null"}, SMALL]}
    yield {"anyOf": [of({"kind": {"const": "a"}, "x": SMALL}), of({"kind": {"const": "b"}, "y": {"type": "boolean"}})]}
    yield {"oneOf": [of({"kind": {"const": "a"}, "x": SMALL}), of({"kind": {"const": "b"}, "y": SHORT})]}
    yield {"oneOf": [{"type": "boolean"}, {"type": "null"}]}
    yield {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 8}]}
    yield {"allOf": [of({"a": SMALL, "b": SMALL}), {"type": "object", "required": ["a", "b"]}]}
    yield {"type": "integer", "minimum": 0, "anyOf": [{"maximum": 3}, {"minimum": 7, "maximum": 9}]}
    yield of({"v": {"anyOf": [SMALL, {"type": "boolean"}, {"type": "null"}, {"enum": ["many"]}]}})
    yield of({"list": {"type": "array", "items": {"oneOf": [{"type": "null"}, SMALL]}, "minItems": 1, "maxItems": 3}})


def references() -> Iterator[Schema]:
    yield {"$defs": {"n": SMALL}, "$ref": "#/$defs/n"}
    yield {**of({"a": {"$ref": "#/definitions/n"}, "b": {"$ref": "#/definitions/n"}}), "definitions": {"n": SMALL}}
    yield of({"a": SMALL, "b": {"$ref": "#/properties/a"}})
    yield {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": of({"c": {"$ref": "#/$defs/c"}}), "c": {"type": "boolean"}},
        "$ref": "#/$defs/a",
    }
    yield {**of({"x": {"$ref": "#/$defs/sl~1ash"}, "y": {"$ref": "#/$defs/til~0de"}}),
           "$defs": {"sl/ash": SMALL, "til~de": {"type": "null"}}}  # fmt: skip


def recursive() -> Iterator[Schema]:
    node = of({"v": SMALL, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})
    yield {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    tree = of({"n": SMALL, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}})
    yield {"$defs": {"tree": tree}, "$ref": "#/$defs/tree"}
    yield {**of({"v": {"type": "boolean"}, "inner": {"$ref": "#"}}), "required": ["v"]}
    yield {
        "$defs": {
            "a": of({"b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]}}),
            "b": of({"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}),
        },
        "$ref": "#/$defs/a",
    }
    yield {"$defs": {"e": {"anyOf": [SMALL, {"type": "array", "items": {"$ref": "#/$defs/e"}, "maxItems": 1}]}},
           "$ref": "#/$defs/e"}  # fmt: skip


def unicode() -> Iterator[Schema]:
    yield {"enum": ["漢字", "かな", "한글"]}
    yield {"enum": ["👩‍👩‍👧", "👍🏽", "é", "é"]}
    yield of({"ключ": SMALL, "schlüssel": SHORT, "鍵": {"type": "boolean"}})
    yield {"const": "naïve ďábelské ódy"}
    yield {"type": "string", "pattern": "^[あ-ん]{1,3}$"}
    yield {"type": "string", "pattern": "^[😀-😎]$"}
    yield {"enum": ["\u200b", "\ufeff", "\u202e", "a\u0301"]}
    yield of({"emoji 🎉": {"enum": ["🎂", "🎁"]}})


def large() -> Iterator[Schema]:
    yield of({f"field_{i}": {"type": "boolean"} for i in range(20)})
    yield {**of({f"field_{i}": SMALL for i in range(200)}, required=False)}
    yield {"anyOf": [of({f"only_{i}": SMALL}) for i in range(60)]}
    yield {"$defs": {f"d{i}": of({"v": {"const": i}}) for i in range(100)},
           "anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(100)]}  # fmt: skip
    yield of({"one": {"enum": [f"a rather long option with number {i}" for i in range(2000)]}})


def everyday() -> Iterator[Schema]:
    yield of({"sentiment": {"enum": ["positive", "neutral", "negative"]}, "score": SMALL})
    yield of({"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 130}, "email": {
        "type": "string", "pattern": "^[a-z]{1,6}@[a-z]{1,6}[.]com$"}})  # fmt: skip
    yield of({"steps": {"type": "array", "items": of({"do": SHORT, "why": SHORT}), "minItems": 1, "maxItems": 2}})
    yield of({"city": SHORT, "unit": {"enum": ["celsius", "fahrenheit"]}, "days": SMALL}, required=False)
    yield of({"title": {"type": "string", "maxLength": 30, "description": "of the book"}, "year": SMALL}, title="Book")
    yield {**of({"answer": {"type": "boolean"}}), "$schema": "https://json-schema.org/draft/2020-12/schema"}
    yield {"type": "array", "items": of({"entity": SHORT, "kind": {"enum": ["person", "place"]}}), "maxItems": 2}
    yield of({"sql": {"type": "string", "pattern": "^SELECT [a-z]{1,5} FROM [a-z]{1,5}$"}})
    yield of({"nested": of({"deep": of({"deeper": {"enum": ["yes", "no"]}})}), "ok": {"type": "boolean"}})
    yield of({"text": {"type": "string"}})  # without a bound


def drawn() -> Iterator[Schema]:
    """At random, of all kinds inside each other."""
    draw = random.Random(16)
    for _ in range(40):
        yield of({f"k{i}": _drawn(draw, 2) for i in range(draw.randint(1, 4))}, required=draw.random() < 0.7)


def _drawn(draw: random.Random, depth: int) -> Schema:
    leaf = draw.choice([SMALL, SHORT, {"type": "boolean"}, {"enum": ["red", "green", 3, None]}, {"type": "null"}])
    if depth == 0:
        return leaf
    inner = _drawn(draw, depth - 1)
    return draw.choice(
        [
            leaf,
            {"type": "array", "items": inner, "minItems": 1, "maxItems": draw.randint(1, 2)},
            of({"a": inner, "b": leaf}),
            {"anyOf": [inner, {"type": "null"}]},
        ]
    )
