"""Lark rules that lie too deep or have no end are refused; the marks of the dialect are read over."""

from __future__ import annotations

import pytest

from gemray_workers.errors import InvalidField
from gemray_workers.grammar.lark_rules import MAX_RULE_DEPTH, check_lark


def _chain(length: int, body: str) -> str:
    return "start: x0\n" + "".join(f"x{i}: {body} x{i + 1}\n" for i in range(length)) + f'x{length}: "a"\n'


@pytest.mark.parametrize("body", ["", '"(" /[/' + r"\/" + "]/", "// x0\n |"])
def test_rules_lie_a_bounded_number_deep(body: str) -> None:
    check_lark("structured.lark", _chain(MAX_RULE_DEPTH - 2, body))
    for grammar in (_chain(3000, body), _chain(MAX_RULE_DEPTH, body).replace("x", "X")):
        with pytest.raises(InvalidField, match=f"at most {MAX_RULE_DEPTH}") as caught:
            check_lark("structured.lark", grammar)
        assert caught.value.field == "structured.lark"


@pytest.mark.parametrize(
    "grammar",
    [
        'start: ("a"|"b") start',
        'start: a\na: "x" b\nb: a "y" | b',
        'start: "a" (start | "b" start)',
        'start: start+ "a"?',
        'start: "a"? start // | "b"',
        'start: "a" start{1,3}',
        '?start: "|" start',
        "start: /a|b/ start",
    ],
)
def test_without_an_end(grammar: str) -> None:
    with pytest.raises(InvalidField, match="without an end"):
        check_lark("structured.lark", grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: ("a"|"b") start | "c"',
        'start: "a"\n  | "b" start',
        'start: "a" start?',
        'start: "a" start*',
        'start: "a" [start]',
        'start: "a" start{0,3}',
        'start: "a" start{,3}',
        'start: "a" start~0..3',
        'start: "a" (start | )',
        'start: a -> start\na: "x"',
        'start[capture="start"]: "a" | start',
        "start: A start | <|tool_call> start | <[5]>\nA.2: /x/",
        'start: %json {"a": 1} start',
        "start: unknown",
        "begin: begin",
        "start: A\nA: A",
        "",
    ],
)
def test_with_an_end_or_left_to_llguidance(grammar: str) -> None:
    check_lark("structured.lark", grammar)


def test_passes_over_rules_are_bounded() -> None:
    rules = "".join(f"x{i}: x{(i + 1) % 300} x{(i + 7) % 300}\n" for i in range(300))
    with pytest.raises(InvalidField, match="without an end"):
        check_lark("structured.lark", f"start: x0\n{rules}")
