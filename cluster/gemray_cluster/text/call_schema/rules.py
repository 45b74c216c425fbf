"""The rules and terminals of one grammar of calls, in Lark as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from gemray_cluster.text.call_schema.pattern import in_slashes, literal_pattern
from gemray_workers.errors import InvalidField, Summary

_BARE_KEY = re.compile(r"[\w$@][\w.$@/-]{0,63}")
KEY = r"/[\p{L}\p{N}_$@][\p{L}\p{M}\p{N}_.$@\/-]{0,63}/"
"""Names of members that stand without quotes."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MAX_RULES = 4096
_TERMINALS = rf"""TEXT: /(?s:.+)/
INTEGER: /-?(0|[1-9][0-9]{{0,17}})/
NUMBER: /-?(0|[1-9][0-9]{{0,17}})(\.[0-9]{{1,32}})?([eE][+-]?[0-9]{{1,2}})?/
KEY: {KEY}
"""


class Rules:
    """The rules of one grammar, each under a name of its own."""

    def __init__(self, quote: str, field: str) -> None:
        """`quote` is the token around strings; `field` names the schemas in errors."""
        self.string = f"{quote} TEXT? {quote}"
        self._quote = quote
        self._field = field
        self._bodies: list[str] = []
        self._names: dict[str, str] = {}
        """Rules that are stated once, by their bodies."""
        self._terminals: dict[str, str] = {}
        pair = 'KEY ":" any_value'
        self._free = (
            f'any_value: {self.string} | NUMBER | "true" | "false" | "null" | any_object'
            ' | "[" (any_value ("," any_value)*)? "]"\n'
            f'any_object: "{{" ({pair} ("," {pair})*)? "}}"\n'
        )

    def reserve(self) -> str:
        """The name of a rule that is stated later; raises InvalidField when there are too many."""
        if len(self._bodies) == _MAX_RULES:
            raise InvalidField(self._field, Summary(f"schemas of more than {_MAX_RULES} rules"), "smaller schemas")
        self._bodies.append("")
        return f"r{len(self._bodies) - 1}"

    def state(self, name: str, body: str) -> None:
        """Give a reserved rule its body."""
        self._bodies[int(name[1:])] = body

    def add(self, body: str) -> str:
        """The name of a rule with this body, a new one unless there is one."""
        if body not in self._names:
            name = self.reserve()
            self.state(name, body)
            self._names[body] = name
        return self._names[body]

    def terminal(self, body: str) -> str:
        """The name of a terminal."""
        return self._terminals.setdefault(body, f"T{len(self._terminals)}")

    def text(self, start: str) -> str:
        """The whole grammar, without what nothing leads to."""
        needed, waiting = set[str](), [start]
        while waiting:
            found = set(re.findall(r"\b[rT]\d+\b", waiting.pop())) - needed
            needed |= found
            waiting += [self._bodies[int(name[1:])] for name in found if self._is_rule(name)]
        rules = "".join(f"r{n}: {body}\n" for n, body in enumerate(self._bodies) if f"r{n}" in needed)
        terminals = "".join(f"{name}: {body}\n" for body, name in self._terminals.items() if name in needed)
        return start + rules + self._free + _TERMINALS + terminals

    def _is_rule(self, name: str) -> bool:
        return name[0] == "r" and int(name[1:]) < len(self._bodies)  # a text may spell what looks like a name

    def string_of(self, terminal: str) -> str:
        """A string of a terminal's texts."""
        return f"{self._quote} {self.terminal(terminal)} {self._quote}"

    def quoted(self, text: str) -> str:
        """A string of this text alone."""
        return f"{self._quote} {literal(text)} {self._quote}" if text else f"{self._quote} {self._quote}"

    def key(self, name: str) -> str:
        """A key and its colon."""
        return literal(name + ":") if _BARE_KEY.fullmatch(name) else f'{self.quoted(name)} ":"'

    def constant(self, value: Any) -> str:
        """One value of JSON."""
        if isinstance(value, str):
            return self.quoted(value)
        if isinstance(value, dict):
            entries = [f"{self.key(key)} {self.constant(inner)}" for key, inner in value.items()]
            return f'"{{" {_separated(entries)} "}}"'
        if isinstance(value, list):
            return f'"[" {_separated(map(self.constant, value))} "]"'
        return literal(json.dumps(value))


def literal(text: str) -> str:
    """A text, as Lark writes it; its strings take no control characters."""
    if _CONTROL.search(text):
        return in_slashes(literal_pattern(text))
    return json.dumps(text, ensure_ascii=False)


def _separated(entries: Iterable[str]) -> str:
    return ' "," '.join(entries)
