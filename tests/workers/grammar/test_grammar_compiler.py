"""What can't be met or compiled is refused by name and place; every size has a bound."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.embedded import embedded_path
from gemray_workers.errors import InvalidField
from gemray_workers.grammar.compiler import MAX_DEPTH, MAX_GRAMMAR_BYTES, GrammarCompiler
from gemray_workers.grammar.grammar import Grammar, GrammarKind
from gemray_workers.grammar.vocabulary import vocabulary_of_directory
from support.structured.schemas import schemas


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = ChatTokenizer.from_directory(embedded_path("gemray-tiny"))
    return GrammarCompiler(tokenizer.grammar_vocabulary(tokenizer.vocab_size))


def test_every_schema_of_the_sweep_compiles(compiler: GrammarCompiler) -> None:
    every = schemas()
    assert len(every) >= 200
    for schema in every.values():
        compiler.compile(Grammar(kind="json_schema", text=json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ({"type": "string", "enum": [1]}, "", "Unsatisfiable"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "", "'a' is unsatisfiable"),
        ({"type": "foo"}, "", "Invalid type: foo"),
        ({"items": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}, "#/items", "anyOf takes them"),
        ({"properties": {"a": {"type": "string", "format": "color"}}}, "#/properties/a", "date-time"),
        ({"$ref": "#/$defs/none"}, "", "does not exist"),
        ({"$ref": "http://example.com/schema"}, "", "does not fetch"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "#/properties/a", "uniqueItems"),
        ({"properties": {"a/b": {"items": {"not": {}}}}}, "#/properties/a~1b/items", "not"),
        ({"anyOf": [{"type": "null"}, {"properties": {"x": {"if": {}}}}]}, "#/anyOf/1/properties/x", "if"),
        ({"items": {"minProperties": 2, "required": ["a"], "additionalProperties": {"enum": [1]}}}, "#/items",
         "minProperties (2) must not be above the number of required names (1)"),
        ({"$defs": {"d": {"pattern": "(?=a)b", "type": "string"}}, "$ref": "#/$defs/d"}, "#/$defs/d", "look-ahead"),
        ({"type": "object", "properties": {"n": {"minLength": 5, "maxLength": 2, "type": "string"}}, "required": ["n"]},
         "#/properties/n",
         "minLength (5) is greater"),
    ],
)  # fmt: skip
def test_a_faulty_schema_is_named_with_its_place(
    compiler: GrammarCompiler, schema: Any, place: str, reason: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        compiler.compile(Grammar(kind="json_schema", text=json.dumps(schema)))
    assert caught.value.field == f"structured.json_schema{place}"
    assert reason in caught.value.allowed


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", "{", "JSON"),
        ("json_schema", "[]", "an object"),
        ("json_schema", "false", "an object"),
        ("json_schema", '{"items":' * (MAX_DEPTH + 1) + "{}" + "}" * (MAX_DEPTH + 1), f"at most {MAX_DEPTH} deep"),
        ("json_schema", "[" * 200_000, f"at most {MAX_DEPTH} deep"),
        ("json_schema", " " * (MAX_GRAMMAR_BYTES + 1), f"at most {MAX_GRAMMAR_BYTES}"),
        ("regex", "(a", "unclosed group"),
        ("regex", "(?<=a)b", "look-behind"),
        ("regex", "", "some text"),
        ("lark", "start: NONE\nNONE: /a/ & /b/", "no text meets it"),
        ("regex", "a{20000}b", "at most 16384"),
        ("regex", "a{99999999}", "at most 16384"),
        ("choice", f'["{"x" * 17_000}"]', "at most 16384"),
        ("lark", "start: nothing", "unknown name"),
        ("lark", "begin: /a/", "start"),
        ("lark", "start: <[9999999]>", ""),
    ],
)
def test_other_faults(compiler: GrammarCompiler, kind: GrammarKind, text: str, says: str) -> None:
    with pytest.raises(InvalidField) as caught:
        compiler.compile(Grammar(kind=kind, text=text))
    assert caught.value.field.startswith(f"structured.{kind}")
    assert says in caught.value.allowed
    assert len(str(caught.value)) < 1000


def test_a_grammar_that_was_compiled_before_starts_anew(compiler: GrammarCompiler) -> None:
    grammar = Grammar(kind="choice", text='["ab", "cd"]')
    first, second = compiler.compile(grammar), compiler.compile(grammar)
    tokens = ChatTokenizer.from_directory(embedded_path("gemray-tiny")).encode("ab")[1:]
    before = second.compute_bitmask()
    assert first.consume_tokens(tokens)
    assert first.is_stopped()
    assert second.compute_bitmask() == compiler.compile(grammar).compute_bitmask() == before


def test_a_rank_reads_the_same_vocabulary_as_the_coordinator(compiler: GrammarCompiler) -> None:
    directory = str(embedded_path("gemray-tiny"))
    ranks = vocabulary_of_directory(directory, compiler.vocab_size)
    assert ranks is not None
    grammar = Grammar(kind="json_object", text="")
    assert GrammarCompiler(ranks).compile(grammar).compute_bitmask() == compiler.compile(grammar).compute_bitmask()


def test_a_checkpoint_without_a_tokenizer_has_no_vocabulary(tmp_path: Any) -> None:
    assert vocabulary_of_directory(str(tmp_path), 100) is None
