"""What can't be met or compiled is refused by name and place; every size has a bound."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.embedded import embedded_path
from gemray_workers.errors import InvalidField
from gemray_workers.grammar.compiler import MAX_DEPTH, MAX_GRAMMAR_BYTES, GrammarCompiler
from gemray_workers.grammar.grammar import Grammar, GrammarKind
from gemray_workers.grammar.schema_limits import MAX_PROPERTIES, MAX_SCHEMA_DEPTH
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
        ("json_schema", '{"type": {"a": 1}}', "type must be a string"),
        ("json_schema", '{"type": [["string"]]}', "type must be a string"),
        ("regex", "(a", "unclosed group"),
        ("regex", "(?<=a)b", "look-behind"),
        ("regex", "", "some text"),
        ("lark", "start: NONE\nNONE: /a/ & /b/", "no text meets it"),
        ("regex", "a{20000}b", "at most 16384"),
        ("regex", "a{99999999}", "at most 16384"),
        ("choice", f'["{"x" * 17_000}"]', "at most 16384"),
        ("lark", "start: nothing", "unknown name"),
        ("lark", "start: " + "A? " * 60_000 + "\nA: /a/", "more than about 65,000 symbols"),
        ("lark", "begin: /a/", "start"),
        ("lark", 'start: ("a"|"b") start', "an end"),
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


def _chain(length: int, link: Callable[[Any], Any]) -> str:
    definitions = {f"x{i}": link({"$ref": f"#/$defs/x{i + 1}"}) for i in range(length)}
    definitions[f"x{length}"] = {"type": "integer"}
    return json.dumps({"$ref": "#/$defs/x0", "$defs": definitions}, separators=(",", ":"))


_LINKS: dict[str, Callable[[Any], Any]] = {
    "properties": lambda to: {"type": "object", "properties": {"a": to}},
    "items": lambda to: {"type": "array", "items": to},
    "anyOf": lambda to: {"anyOf": [to, {"type": "null"}]},
    "$ref": lambda to: to,
}


@pytest.mark.parametrize("link", _LINKS.values(), ids=_LINKS)
def test_references_lead_through_a_bounded_number_of_schemas(
    compiler: GrammarCompiler, link: Callable[[Any], Any]
) -> None:
    compiler.compile(Grammar(kind="json_schema", text=_chain(MAX_SCHEMA_DEPTH // 2 - 2, link)))
    with pytest.raises(InvalidField, match=f"at most {MAX_SCHEMA_DEPTH}") as caught:
        compiler.compile(Grammar(kind="json_schema", text=_chain(3000, link)))
    assert caught.value.field.startswith("structured.json_schema#/$defs/x")


def test_a_schema_in_itself_counts_once(compiler: GrammarCompiler) -> None:
    everything = {"anyOf": [{"type": "null"}, *({"$ref": f"#/$defs/x{i}"} for i in range(100))]}
    objects = {f"x{i}": {"type": "object", "properties": {"a": {"$ref": "#"}}} for i in range(100)}
    compiler.compile(Grammar(kind="json_schema", text=json.dumps({**everything, "$defs": objects})))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"default": 18446744073709551616}', "#/default"),
        ('{"items": {"enum": [-9223372036854775809]}}', "#/items/enum/0"),
        (f'{{"items": {{"enum": [-{"1" * 5000}]}}}}', "#/items/enum/0"),
        ('{"const": "\\ud800"}', "#/const"),
        ('{"properties": {"\\udfff": {}}}', "#/properties"),
        ('{"properties": {"a": {"pattern": "\\ud800"}}}', "#/properties/a/pattern"),
        ('{"required": ["a", "\\ud800"]}', "#/required/1"),
    ],
)
def test_what_llguidance_can_not_read_is_refused_with_its_place(
    compiler: GrammarCompiler, text: str, place: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        compiler.compile(Grammar(kind="json_schema", text=text))
    assert caught.value.field == f"structured.json_schema{place}"
    str(caught.value).encode()


def test_as_many_optional_properties_as_are_accepted_can_be_written(compiler: GrammarCompiler) -> None:
    names = {f"p{i}": {"type": "integer"} for i in range(MAX_PROPERTIES)}
    matcher = compiler.compile(Grammar(kind="json_schema", text=json.dumps({"type": "object", "properties": names})))
    tokenizer = ChatTokenizer.from_directory(embedded_path("gemray-tiny"))
    assert matcher.consume_tokens(tokenizer.encode('{"p0":1,"p7":2,"other"')[1:])
    matcher.compute_bitmask()
    assert not matcher.is_error(), matcher.get_error()

    halves = [{"type": "object", "properties": dict(list(names.items())[i::2])} for i in range(2)]
    compiler.compile(Grammar(kind="json_schema", text=json.dumps({"anyOf": halves})))
    halves.append({"type": "object", "properties": {"one_more": {}}})
    with pytest.raises(InvalidField, match=f"{MAX_PROPERTIES + 1} properties.*at most {MAX_PROPERTIES}"):
        compiler.compile(Grammar(kind="json_schema", text=json.dumps({"anyOf": halves})))
