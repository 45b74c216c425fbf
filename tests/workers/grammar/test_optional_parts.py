"""Expressions of many parts that may be left out are refused before they are compiled, which would take minutes."""

from __future__ import annotations

import json

import pytest
from llguidance import LLTokenizer

from gemray_workers.errors import InvalidField
from gemray_workers.grammar.compiler import GrammarCompiler
from gemray_workers.grammar.grammar import Grammar, GrammarKind
from gemray_workers.grammar.optional_parts import MAX_OPTIONAL_PARTS, num_optional_parts

MANY = 100 * MAX_OPTIONAL_PARTS


@pytest.mark.parametrize(
    ("expression", "count"),
    [
        ("a?b*c+d{0,3}e{,2}f{0}g{1,2}h{10}", 5),
        (r"[?*]\?\*\x{0}\u{0,1}\p{L}", 0),
        ("a??b*?c+?d{2}?", 2),
        ("(?:a)(?i:b)(?<n>c)(?P<m>d)(?i)e(f)", 0),
        ("a|b|c", 0),
        ("(a|)(|b)(?:|c)(d||e)()", 5),
        ("|a", 1),
        ("a|", 1),
        ("", 1),
        ("(a?b?){3}", 2),
        ("[]a?]?", 2),  # what ends a class in one language is a member in another: never fewer than there are
    ],
)
def test_parts_are_counted(expression: str, count: int) -> None:
    assert num_optional_parts(expression) == count


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(LLTokenizer("byte"))


def _terminal(name: str, text: str, count: int) -> str:
    parts = f'"{text}"? ' * count
    return f"{name}: {parts}\n"


def _forms(count: int) -> list[tuple[GrammarKind, str, str]]:
    run = "a?" * count
    pattern = f"^x{run}$"
    return [
        ("regex", f"x{run}", ""),
        ("json_schema", json.dumps({"properties": {"p": {"pattern": pattern}}}), "#/properties/p/pattern"),
        ("json_schema", json.dumps({"patternProperties": {pattern: {}}}), "#/patternProperties"),
        ("lark", f'start: "x" /y{run}/', ""),
        ("lark", f"start: A\nA: B C\nB: /{'a?' * (count - 9)}/\n" + _terminal("C", "b", 9), ""),
    ]


@pytest.mark.parametrize("form", range(len(_forms(1))))
def test_forms_of_too_many_are_refused_by_name(compiler: GrammarCompiler, form: int) -> None:
    kind, text, _ = _forms(MAX_OPTIONAL_PARTS)[form]
    compiler.compile(Grammar(kind=kind, text=text))
    kind, text, place = _forms(MAX_OPTIONAL_PARTS + 1)[form]
    with pytest.raises(InvalidField, match=f"{MAX_OPTIONAL_PARTS + 1} parts that may be left out") as caught:
        compiler.compile(Grammar(kind=kind, text=text))
    assert caught.value.field == f"structured.{kind}{place}"
    with pytest.raises(InvalidField, match=f"at most {MAX_OPTIONAL_PARTS}"):
        compiler.compile(Grammar(kind="regex", text="a?" * MANY))


def test_terminals_count_with_those_that_they_are_made_of(compiler: GrammarCompiler) -> None:
    grammar = f"start: A\nA: {'B C ' * 75}\n" + _terminal("B", "a", 1000) + _terminal("C", "b", 1000)
    with pytest.raises(InvalidField, match="A with 150000 parts that may be left out"):
        compiler.compile(Grammar(kind="lark", text=grammar))
    words = " | ".join(f'"x{i}"' for i in range(4 * MAX_OPTIONAL_PARTS))
    compiler.compile(Grammar(kind="lark", text=f"start: WORD\nWORD: {words}\n"))
