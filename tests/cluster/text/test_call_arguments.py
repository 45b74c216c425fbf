"""Arguments become JSON whatever a model writes, and the JSON that it meant where it keeps to the notation."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray_cluster.text.call_arguments import MAX_DEPTH, CallArguments

QUOTE = "Q"
"""Stands for the quote token; no test below uses the letter otherwise."""


def run(notation: str) -> tuple[str, bool]:
    """(JSON, whether it is complete) of what stands behind the opening brace."""
    arguments, written = CallArguments(), "{"
    for index, part in enumerate(notation.split(QUOTE)):
        written += (arguments.quote() if index else "") + arguments.write(part)
    return written, arguments.is_complete


@pytest.mark.parametrize(
    ("notation", "meant"),
    [
        ("}", {}),
        ("city:QParisQ}", {"city": "Paris"}),
        ("a:QQ,b:1.5e3,c:true,d:null}", {"a": "", "b": 1500.0, "c": True, "d": None}),
        ('a:Q{x:[1,"y"]}Q}', {"a": '{x:[1,"y"]}'}),
        ("a:[1,[],{b:[QxQ,QyQ]}], c : -2 }", {"a": [1, [], {"b": ["x", "y"]}], "c": -2}),
        ("a:{},b:[{}]}", {"a": {}, "b": [{}]}),
        # JSON as the templates of some checkpoints write it
        ('"a": {"b": ["x, y", "\\u00e9\\"}"]}}', {"a": {"b": ["x, y", 'é"}']}}),
        ("Qa bQ:1}", {"a b": 1}),
        ("Qa:,bQ:1}", {"a:,b": 1}),
        # what is not the notation
        ("city:Paris}", {"city": "Paris"}),
        ("city: New York ,n:007}", {"city": "New York", "n": "007"}),
        ("a:x]y,b:1e999,c:NaN}", {"a": "x]y", "b": "1e999", "c": "NaN"}),
        ("a:,b}", {"a": "", "b": ""}),
        ("a:[1,,2,],}", {"a": [1, 2]}),
        ("a:QxQ y,b:1}", {"a": "x", "b": 1}),
        ('a:"\\ud800",b:"\\x"}', {"a": "\ufffd", "b": "\\x"}),
        ("a:xQyQ}", {"a": 'x"y"'}),
    ],
)
def test_meaning(notation: str, meant: dict[str, Any]) -> None:
    written, is_complete = run(notation)
    assert is_complete
    assert json.loads(written) == meant


def test_nothing_is_written_behind_the_last_brace() -> None:
    assert run("a:1} and:Qmore{}Q") == ('{"a":1}', True)


def test_depth_is_bounded() -> None:
    deepest = "a:" + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}"
    assert run(deepest)[1]
    assert run(deepest.replace("[", "[[", 1).replace("]", "]]", 1))[1] is False


@settings(max_examples=500)
@given(notation=st.text(alphabet='{}[],:" \\aQ1-.eu漢', max_size=40), cuts=st.sets(st.integers(0, 40)))
def test_anything_is_json_in_any_chunks(notation: str, cuts: set[int]) -> None:
    """A beginning of JSON at every point, and JSON once complete."""
    arguments, written = CallArguments(), "{"
    borders = [0, *sorted(cut for cut in cuts if cut < len(notation)), len(notation)]
    for start, stop in itertools.pairwise(borders):
        for index, part in enumerate(notation[start:stop].split(QUOTE)):
            written += (arguments.quote() if index else "") + arguments.write(part)
    assert (written, arguments.is_complete) == run(notation)
    if arguments.is_complete:
        assert isinstance(json.loads(written), dict)
    else:
        with pytest.raises(json.JSONDecodeError):
            json.loads(written)
