"""The rules of a Lark grammar, read as far as their depth, their ends and their optional parts need."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat

from gemray_workers.errors import InvalidField, Summary
from gemray_workers.grammar.optional_parts import ALLOWED, MAX_OPTIONAL_PARTS, num_optional_parts

MAX_RULE_DEPTH = 1024
"""Rules and terminals one inside the other; one inside itself counts once."""
_MAX_PASSES = 16
"""Looks at all rules for those that end: an ordinary grammar takes two or three."""
_TOKEN = re.compile(
    r"""(?P<gap>(?://|\#)[^\n]*|[ \t\r]+)
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[a-z]*|<[^<>\s]+>)
    |(?P<name>[?!]*[A-Za-z_]\w*)
    |(?P<mark>->|::|\.\.|\{\s*(?:0+\s*)?,|\{|~\s*0*(?=\.\.)|\d+|\n|.)""",
    re.VERBOSE | re.DOTALL,
)
_HEAD = re.compile(r"^[ \t]*[?!]*([A-Za-z_]\w*)(?:\.-?\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:(?!:)", re.MULTILINE)
_NOT_READ = frozenset({"%", "::"})
"""Marks of grammars inside a grammar, and of rules with parameters."""

_NONE_OR_MORE = ("?", "*", "{,", "{0,", "~0")
_IN_EXPRESSION = "/?"
"""Stands behind an expression for each part of it that may be left out."""
_OPTIONAL = frozenset({*_NONE_OR_MORE, "[", _IN_EXPRESSION})

Bodies = Mapping[str, Sequence[str]]
"""The tokens of each rule, by its name."""


def check_lark(field: str, text: str) -> None:
    """Raise InvalidField for rules that lie too deep, terminals of too many optional parts, or a start that no finite
    text has.

    The last is not told for grammars with `%` or with parameters.
    """
    bodies = _read(text)
    order = _in_order(field, bodies)
    _check_optional_parts(field, bodies, order)
    if not any(not _NOT_READ.isdisjoint(body) for body in bodies.values()) and not _ends(bodies, order):
        value = Summary("rules whose texts contain themselves without an end")
        raise InvalidField(field, value, "a start with an end: an alternative or a `?` without itself")


def _read(text: str) -> Bodies:
    heads = list(_HEAD.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return {head[1]: list(_tokens(text[head.end() : end])) for head, end in zip(heads, ends, strict=False)}


def _tokens(body: str) -> Iterator[str]:
    for found in _TOKEN.finditer(body):
        if found.lastgroup == "name":
            yield found[0].lstrip("?!")
        elif found.lastgroup == "text":
            yield '"'
            if found[0].startswith("/"):
                yield from repeat(_IN_EXPRESSION, num_optional_parts(found[0][1 : found[0].rindex("/")]))
        elif found.lastgroup == "mark" and found[0] != "\n":
            yield re.sub(r"\s", "", found[0])


def _in_order(field: str, bodies: Bodies) -> list[str]:
    """What start leads to, what a rule needs before it; raises InvalidField where that is too deep."""
    heights: dict[str, int] = {}
    seen = {"start"}
    path = [("start", iter(bodies.get("start", ())))]
    while path:
        name, left = path[-1]
        inner = next((token for token in left if token in bodies and token not in seen), None)
        if inner is not None:
            seen.add(inner)
            path.append((inner, iter(bodies[inner])))
            continue
        path.pop()
        heights[name] = 1 + max((heights.get(token, 0) for token in bodies.get(name, ())), default=0)
        if heights[name] > MAX_RULE_DEPTH:
            value = Summary(f"more than {MAX_RULE_DEPTH} rules one inside the other, at {name[:40]}")
            raise InvalidField(field, value, f"at most {MAX_RULE_DEPTH}")
    return list(heights)


def _check_optional_parts(field: str, bodies: Bodies, order: Sequence[str]) -> None:
    """A terminal is one expression, with the terminals that it is made of; in rules each expression stands alone."""
    counts: dict[str, int] = {}
    for name in order:
        total = run = most = 0
        previous = "|"
        for token in (*bodies.get(name, ()), ")"):
            run = run + 1 if token == _IN_EXPRESSION else 0
            most = max(most, run)
            is_empty = token in ("|", ")") and previous in ("|", "(")
            total += is_empty or token in _OPTIONAL
            total += counts.get(token, 0)
            previous = token
        counts[name] = total if name.isupper() else 0
        if max(most, counts[name]) > MAX_OPTIONAL_PARTS:
            value = Summary(f"{name[:40]} with {max(most, counts[name])} parts that may be left out")
            raise InvalidField(field, value, ALLOWED)


def _ends(bodies: Bodies, order: Sequence[str]) -> bool:
    """Whether start has a finite text, as far as `_MAX_PASSES` tell."""
    ending = {name for name in order if name.isupper()}  # terminals: llguidance refuses those inside themselves
    for _ in range(_MAX_PASSES):
        found = {name for name in order if name not in ending and _has_end(bodies.get(name, ()), bodies, ending)}
        ending |= found
        if "start" in ending or not found:
            return "start" in ending
    return True


def _has_end(body: Sequence[str], bodies: Bodies, ending: set[str]) -> bool:
    """Whether one alternative of a rule has only parts that end."""
    groups: list[tuple[bool, bool, str]] = []
    any_before, before, here = False, True, True
    """Whether an earlier alternative ends; this one up to its last part; and with it."""
    previous = ""
    for token in body:
        if token in ("(", "["):
            groups.append((any_before, here, token))
            any_before, before, here = False, True, True
        elif token in (")", "]") and groups:
            ended = any_before or here
            any_before, before, opening = groups.pop()
            here = before and (ended or opening == "[")
        elif token == "|":
            any_before, before, here = any_before or here, True, True
        elif token in _NONE_OR_MORE:
            here = before
        elif token in bodies and previous != "->":
            before, here = here, here and token in ending
        elif token == '"':
            before = here
        previous = token
    return any_before or here
