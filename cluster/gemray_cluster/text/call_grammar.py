"""A grammar of the calls that a request requires, in Gemma's notation: `call:NAME{key:value,...}` between two tokens.

Arguments follow their JSON schema in types, properties, required ones, `enum`, `const`, `anyOf`, `oneOf` and `$ref`
within the schema; other keywords (lengths, ranges, patterns) are the model's to keep. Properties come in the order in
which the schema declares them, as far as they come, and no others. Lark as llguidance reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gemray_cluster.text.structure import CLOSES_CALL, OPENS_CALL, QUOTE
from gemray_cluster.text.tool_calls import NAME
from gemray_workers.errors import InvalidField, Summary

TOKENS_OF_CALLS = (OPENS_CALL, CLOSES_CALL, QUOTE)
_FIELD = "chat.tools_json"
_BARE_KEY = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_MAX_RULES = 4096
_SIMPLE = {
    "integer": "INTEGER",
    "number": "NUMBER",
    "boolean": '"true" | "false"',
    "null": '"null"',
    None: "any_value",
}
_TERMINALS = r"""TEXT: /(?s:.+)/
INTEGER: /-?(0|[1-9][0-9]{0,17})/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,32})?([eE][+-]?[0-9]{1,2})?/
KEY: /[A-Za-z_][A-Za-z0-9_.-]{0,63}/
"""


def call_grammar(tools: Sequence[Mapping[str, Any]], control_ids: Mapping[str, int], *, several: bool) -> str:
    """Lark of one call, or of one and more.

    Args:
        tools: function declarations, alone or as OpenAI wraps them; their shape has been checked.
        control_ids: of the tokenizer; has `TOKENS_OF_CALLS`.
        several: whether further calls may follow the first.

    Raises:
        InvalidField: a name that no call can have, or a schema that can't be followed.
    """
    opens, closes, quote = (f"<[{control_ids[token]}]>" for token in TOKENS_OF_CALLS)
    rules = _Rules(quote)
    calls = [_call(rules, tool.get("function", tool), index) for index, tool in enumerate(tools)]
    call = rules.add(f"{opens} ({' | '.join(calls)}) {closes}")
    return rules.text(f"start: {call} {call}*\n" if several else f"start: {call}\n")


def _call(rules: _Rules, function: Mapping[str, Any], index: int) -> str:
    name, parameters = function["name"], function.get("parameters")
    if not NAME.fullmatch(name):
        raise InvalidField(f"{_FIELD}[{index}].name", Summary.of_text(name), "letters, digits and _ . / : -")
    arguments = '"{}"' if parameters is None else _Schema(rules, parameters, f"{_FIELD}[{index}].parameters").object()
    return f"{_literal('call:' + name)} {arguments}"


class _Rules:
    """The rules of one grammar, each under a name of its own."""

    def __init__(self, quote: str) -> None:
        """`quote` is the token around strings."""
        self.string = f"{quote} TEXT? {quote}"
        self._quote = quote
        self._bodies: list[str] = []
        pair = 'KEY ":" any_value'
        self._free = (
            f'any_value: {self.string} | NUMBER | "true" | "false" | "null" | any_object'
            ' | "[" (any_value ("," any_value)*)? "]"\n'
            f'any_object: "{{" ({pair} ("," {pair})*)? "}}"\n'
        )

    def reserve(self) -> int:
        """The number of a rule that is stated later."""
        if len(self._bodies) == _MAX_RULES:
            raise InvalidField(_FIELD, Summary(f"schemas of more than {_MAX_RULES} rules"), "smaller schemas")
        self._bodies.append("")
        return len(self._bodies) - 1

    def state(self, number: int, body: str) -> str:
        """Give a reserved rule its body; returns its name."""
        self._bodies[number] = body
        return f"r{number}"

    def add(self, body: str) -> str:
        """A new rule; returns its name."""
        return self.state(self.reserve(), body)

    def text(self, start: str) -> str:
        """The whole grammar."""
        rules = "".join(f"r{number}: {body}\n" for number, body in enumerate(self._bodies))
        return start + rules + self._free + _TERMINALS

    def quoted(self, text: str) -> str:
        """A string of this text alone."""
        return f"{self._quote} {_literal(text)} {self._quote}" if text else f"{self._quote} {self._quote}"

    def key(self, name: str) -> str:
        """A key and its colon."""
        return _literal(name + ":") if _BARE_KEY.fullmatch(name) else f'{self.quoted(name)} ":"'

    def constant(self, value: Any) -> str:
        """One value of JSON."""
        if isinstance(value, str):
            return self.quoted(value)
        if isinstance(value, dict):
            entries = [f"{self.key(key)} {self.constant(inner)}" for key, inner in value.items()]
            return f'"{{" {_separated(entries)} "}}"'
        if isinstance(value, list):
            return f'"[" {_separated(map(self.constant, value))} "]"'
        return _literal(json.dumps(value))


class _Schema:
    """The rules of one function's parameters."""

    def __init__(self, rules: _Rules, root: Mapping[str, Any], field: str) -> None:
        """`root` is what references start from; `field` names it in errors."""
        self._rules = rules
        self._root = root
        self._field = field
        self._referred: dict[str, str] = {}  # rule by reference

    def object(self) -> str:
        """The parameters themselves, which are always an object."""
        return self._object(self._resolved(self._root))

    def _value(self, schema: Any) -> str:
        """The name of a rule, or an expression without alternatives, of the values that a schema allows."""
        if schema is False:
            raise InvalidField(self._field, Summary("a schema `false`"), "schemas that some value meets")
        if not isinstance(schema, dict):
            return "any_value"
        if isinstance(reference := schema.get("$ref"), str):
            return self._reference(reference)
        if "const" in schema:
            return self._rules.constant(schema["const"])
        if isinstance(values := schema.get("enum"), list) and values:
            return self._rules.add(" | ".join(map(self._rules.constant, values)))
        for key in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(key), list) and options:
                return self._rules.add(" | ".join(map(self._value, options)))
        named = schema.get("type", "object" if "properties" in schema else None)
        kinds = list(named) if isinstance(named, list) else [named]
        kinds += ["null"] if schema.get("nullable") is True else []
        return self._rules.add(" | ".join(self._of_type(kind, schema) for kind in kinds))

    def _of_type(self, kind: Any, schema: Mapping[str, Any]) -> str:
        kind = kind.lower() if isinstance(kind, str) else kind  # Gemma's declarations write types in capitals
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            item = self._rules.add(self._value(schema.get("items")))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "string":
            return self._rules.string
        if kind is not None and not (isinstance(kind, str) and kind in _SIMPLE):
            raise InvalidField(self._field, Summary.of_text(str(kind)), "a type of JSON schema")
        return _SIMPLE[kind]

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, dict) or not properties:
            return '"{}"' if schema.get("additionalProperties") is False else "any_object"
        named = schema.get("required")
        required = set(map(str, named)) if isinstance(named, list) else set()
        # What may follow a property, and what may come with none before it: from the last property on.
        behind = first = ""
        latest = next((place for place, name in enumerate(properties) if name in required), len(properties))
        for place, (name, inner) in reversed([*enumerate(properties.items())]):
            pair = self._rules.add(f"{self._rules.key(name)} {self._value(inner)}")
            if place == latest:
                first = f"{pair} {behind}"
            elif place < latest:  # behind a required property none is the first
                first = self._rules.add(f"{pair} {behind} | {first}") if first else f"({pair} {behind})?"
            if place:  # nothing comes before the first
                behind = self._rules.add(f'"," {pair} {behind}' if name in required else f'("," {pair})? {behind}')
        return f'"{{" {first} "}}"'

    def _reference(self, reference: str) -> str:
        """The rule of what a reference names: each once, so that schemas may contain themselves."""
        if reference not in self._referred:
            number = self._rules.reserve()
            self._referred[reference] = f"r{number}"
            self._rules.state(number, self._value(self._target(reference)))
        return self._referred[reference]

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema behind its own references."""
        seen: set[str] = set()
        while isinstance(reference := schema.get("$ref"), str):
            target = self._target(reference)
            if reference in seen or not isinstance(target, dict):
                raise InvalidField(self._field, Summary.of_text(reference), "references to schemas of objects")
            seen.add(reference)
            schema = target
        return schema

    def _target(self, reference: str) -> Any:
        part: Any = self._root
        head, *steps = reference.split("/")
        for step in steps:
            key = step.replace("~1", "/").replace("~0", "~")
            part = part.get(key) if isinstance(part, dict) else None
        if head != "#" or part is None:
            raise InvalidField(self._field, Summary.of_text(reference), "references within the schema: #/$defs/NAME")
        return part


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _separated(entries: Iterable[str]) -> str:
    return ' "," '.join(entries)
