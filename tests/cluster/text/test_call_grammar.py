"""Grammars of required calls: what fits the schema is taken, and what is taken fits the schema."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gemray_cluster.text.call_grammar import Callable, call_grammar
from gemray_cluster.text.call_schema.located import Located
from gemray_cluster.text.call_schema.well_formed import check_schema
from gemray_cluster.text.detokenizer import Detokenizer
from gemray_cluster.text.output import OutputRules, OutputStream
from gemray_cluster.text.tokenizer import SPECIAL_TOKENS, ChatTokenizer
from gemray_workers.embedded import embedded_path
from gemray_workers.errors import InvalidField
from gemray_workers.grammar.compiler import GrammarCompiler
from gemray_workers.grammar.grammar import Grammar
from gemray_workers.grammar.vocabulary import END_MARK
from gemray_workers.messages import SequenceDelta
from support.cluster.calls import QUOTE, call_ids, keys, values
from support.structured.schemas import Schema, of, schemas

TREE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["value"],
    "additionalProperties": False,
}
NULL: Schema = {"type": "null"}
FLAG: Schema = {"type": "boolean"}
SCHEMAS: list[Schema] = [
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object"},
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "null"}}},
    {"properties": {"a": {"type": "number"}, "b": {"type": "STRING"}, "c": {}}, "required": ["c", "a"]},
    {"type": "object", "properties": {"unit": {"enum": ["C", "F", "", 3, None, [1, "x"], {"k y": True}]}},
     "required": ["unit"]},
    {"type": "object", "properties": {"x": {"const": "漢 \"quoted\"\n"}, "y z": {"type": ["string", "null"]}}},
    {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {}}]}}},
    {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
    {"type": "object", "properties": {"n": {"type": "integer", "nullable": True}}, "required": ["n"]},
    of({"low": {"type": "integer", "minimum": 3, "maximum": 7}, "step": {"type": "integer", "multipleOf": 7}}),
    of({"x": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "y": {"minimum": 2, "maximum": 9}}),
    of({"x": {"type": "integer", "minimum": 2, "exclusiveMinimum": 1, "allOf": [{"maximum": 3}]}}),
    of({"byte": {"type": "integer", "format": "uint8"}}),
    of({"word": {"type": "string", "pattern": "^[a-z]{2,4}$"}, "four": {"type": "string", "maxLength": 4,
        "minLength": 1}, "none": {"type": "string", "maxLength": 0}}),
    of({"mark": {"type": "string", "pattern": r"^\d\w\s[^\d]\u00e9\.$"}, "ends": {"pattern": "^(a|b)$|^c{3}$",
        "type": "string"}}),
    of({"inside": {"type": "string", "pattern": "ab", "maxLength": 6}}),
    *(of({"at": {"type": "string", "format": name}}) for name in ("date", "date-time", "time", "duration", "ipv4")),
    *(of({"at": {"type": "string", "format": name}}) for name in ("uuid", "email", "hostname", "ipv6", "uri")),
    of({"flags": {"type": "array", "items": FLAG, "minItems": 2, "maxItems": 3}}),
    of({"tags": {"type": "array", "items": {"enum": ["x", "y", "z"]}, "uniqueItems": True, "minItems": 2}}),
    of({"pair": {"type": "array", "prefixItems": [NULL, FLAG], "items": {"const": "z"}, "maxItems": 4}}),
    {"allOf": [{"required": ["a"], "properties": {"a": FLAG}}, {"required": ["b"], "properties": {"b": NULL}}],
     "properties": {"a": {"type": ["boolean", "null"]}, "b": {}}},
    {"oneOf": [of({"kind": {"const": "a"}, "x": NULL}), of({"kind": {"const": "b"}})]},
    {"oneOf": [of({"a": NULL}), {"properties": {"b": NULL}, "required": ["b"]}]},
    {"allOf": [{"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
     {"oneOf": [of({"a": NULL}), of({"b": NULL})]}]},
    {"properties": {"a": NULL, "b": NULL}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"type": "object", "additionalProperties": FLAG, "maxProperties": 2, "minProperties": 1},
    {"properties": {"a": NULL}, "additionalProperties": FLAG, "required": ["z"]},
    {"patternProperties": {"^x_": FLAG, "y$": NULL}, "additionalProperties": False},
    {"propertyNames": {"enum": ["aa", "bb"]}, "additionalProperties": FLAG},
    {"propertyNames": {"pattern": "^[a-c]{2}$"}, "additionalProperties": FLAG, "minProperties": 1},
    {"properties": dict.fromkeys("abcd", NULL), "minProperties": 2, "maxProperties": 3},
    of({"город": {"enum": ["Москва", "Париж"]}, "с пробелом": NULL, "鍵": FLAG}),
    of({"v": {"enum": [1, "1", None, True, 2.5, {"a": "x"}], "type": ["integer", "string"], "minimum": 1}}),
    {"properties": {"a": {"$ref": "#"}, "b": NULL}},
    {"properties": {"never": False, "empty": {"type": "integer", "minimum": 5, "maximum": 3}, "c": NULL}},
    of({"m": {"properties": {"a": NULL}, "unevaluatedProperties": False}}),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.from_directory(embedded_path("gemray-tiny"))


@pytest.fixture(scope="module")
def compiler(tokenizer: ChatTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.grammar_vocabulary(tokenizer.vocab_size))


def function(name: str, schema: Schema | None = None, *, is_lenient: bool = False) -> Callable:
    parameters = None if schema is None else Located(schema, f"{name}.parameters")
    if parameters is not None:
        check_schema(parameters)
    return Callable(name, parameters, is_lenient)


def grammar_of(tokenizer: ChatTokenizer, *functions: Callable, several: bool = False) -> Grammar:
    return Grammar(kind="lark", text=call_grammar(functions, tokenizer.control_ids, several=several))


def is_taken(compiler: GrammarCompiler, grammar: Grammar, ids: list[int]) -> bool:
    """Whether the ids are a whole text of the grammar."""
    matcher = compiler.compile(grammar)
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


def schema_of(value: Any) -> dict[str, Any]:
    """A schema that this value meets."""
    simple = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    if type(value) in simple:
        return {"type": simple[type(value)]}
    if isinstance(value, list):
        return {"type": "array", "items": {"anyOf": [schema_of(item) for item in value]} if value else {}}
    properties = {key: schema_of(inner) for key, inner in value.items()}
    return {"type": "object", "properties": properties, "required": list(value)[::2]}


@settings(max_examples=60)
@given(value=st.dictionaries(keys, values, max_size=3), left_out=st.booleans())
def test_what_fits_is_taken(compiler: GrammarCompiler, tokenizer: ChatTokenizer, value: Any, left_out: bool) -> None:
    assume(not re.search(r"e-\d{3}", json.dumps(value)))  # a grammar's exponents have two digits
    schema = schema_of(value)
    if left_out:
        value = {key: inner for key, inner in value.items() if key in schema["required"]}
    assert is_taken(compiler, grammar_of(tokenizer, function("f", schema)), call_ids(tokenizer, "f", value))


def walk(compiler: GrammarCompiler, tokenizer: ChatTokenizer, grammar: Grammar, draw: random.Random) -> list[int]:
    """Ids along the masks at random, soon at an end; what is not over after 400 ids is cut."""
    matcher, ids = compiler.compile(grammar), list[int]()
    while not matcher.is_stopped() and len(ids) < 400:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = [int(i) for i in np.flatnonzero(bits) if i != END_MARK]
        assert allowed, "no id may follow"
        short = [i for i in allowed if i == QUOTE or tokenizer.bytes_of(i) in (b"}", b"]")]
        ids.append(draw.choice(short if short and draw.random() < 0.5 else allowed))
        assert matcher.try_consume_tokens(ids[-1:]) == 1
    return ids if matcher.is_stopped() else []


def check_walks(compiler: GrammarCompiler, tokenizer: ChatTokenizer, schema: Schema, plain: Schema, count: int) -> int:
    """Walks, each read as an answer is and held against the schema; returns how many of them came to an end."""
    draw, num_ended = random.Random(7), 0
    grammar = grammar_of(tokenizer, function("f", schema))
    for _ in range(count):
        ids = walk(compiler, tokenizer, grammar, draw)
        if not ids:
            continue
        num_ended += 1
        output = OutputStream(Detokenizer(tokenizer), OutputRules())
        pieces = output.push(SequenceDelta(request_id="r", token_ids=ids, finish="grammar")).calls
        assert [piece.name for piece in pieces if piece.name is not None] == ["f"]
        assert pieces[-1].is_complete
        jsonschema.validate(
            json.loads("".join(piece.arguments for piece in pieces)),
            plain,
            jsonschema.Draft202012Validator,
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
        )
    return num_ended


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_what_is_taken_fits(compiler: GrammarCompiler, tokenizer: ChatTokenizer, schema: dict[str, Any]) -> None:
    plain = json.loads(json.dumps(schema).replace("STRING", "string"))
    if plain.get("properties", {}).get("n", {}).pop("nullable", False):
        plain["properties"]["n"]["type"] = ["integer", "null"]
    assert check_walks(compiler, tokenizer, schema, plain, 6) > 0


def test_arguments_of_every_schema_of_the_sweep_fit(compiler: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    """The schemas that structured answers are tried with, each as that of a parameter."""
    num_ended = 0
    for schema in schemas().values():
        inner = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
        if '"#/properties' in json.dumps(schema) or '"#"' in json.dumps(schema):
            if not isinstance(schema.get("properties"), dict):
                continue
            parameters = schema  # it refers to its own root
        else:
            parameters = {**of({"x": inner}), **{key: schema[key] for key in ("$defs", "definitions") if key in schema}}
        num_ended += check_walks(compiler, tokenizer, parameters, parameters, 1)
    assert num_ended > 200


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_no_rule_is_stated_for_nothing(tokenizer: ChatTokenizer, schema: dict[str, Any]) -> None:
    text = grammar_of(tokenizer, function("f", schema)).text
    for name in re.findall(r"^([rT]\d+):", text, re.MULTILINE):
        assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{name} is used nowhere"


def test_calls_of_several_functions(compiler: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    functions = [function("f"), function("get.weather", SCHEMAS[2])]
    f, weather = call_ids(tokenizer, "f", {}), call_ids(tokenizer, "get.weather", {"city": "Paris"})
    several = grammar_of(tokenizer, *functions, several=True)
    assert all(is_taken(compiler, several, ids) for ids in (f, weather, weather + f + weather))
    one = grammar_of(tokenizer, *functions)
    assert is_taken(compiler, one, weather)
    wrong = [f + f, [], call_ids(tokenizer, "g", {}), call_ids(tokenizer, "f", {"a": 1}), weather[:-1],
             call_ids(tokenizer, "get.weather", {"city": 1}), call_ids(tokenizer, "get.weather", {})]  # fmt: skip
    assert not any(is_taken(compiler, one, ids) for ids in wrong)
    matcher = compiler.compile(one)
    assert matcher.try_consume_tokens([SPECIAL_TOKENS["<|tool_call>"]]) == 1
    assert matcher.try_consume_tokens(tokenizer.encode("hello")[1:]) == 0


def test_what_a_schema_says_of_a_value_is_held(compiler: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    """A value that meets each keyword, and one that does not."""
    cases: list[tuple[Schema, Any, Any]] = [
        ({"type": "integer", "minimum": 3}, 3, 2),
        ({"type": "integer", "maximum": 30}, -30, 31),
        ({"type": "number", "exclusiveMaximum": 1.5}, 1.25, 1.5),
        ({"type": "integer", "multipleOf": 5}, 15, 16),
        ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, "AB-1", "AB-"),
        ({"type": "string", "pattern": "b"}, "abc", "ac"),
        ({"type": "string", "pattern": "^$"}, "", "a"),
        ({"type": "string", "minLength": 2}, "漢漢", "漢"),
        ({"type": "string", "maxLength": 2}, "", "abc"),
        ({"type": "string", "format": "date"}, "2024-02-29", "2023-02-29"),
        ({"type": "string", "format": "ipv4"}, "10.0.0.255", "10.0.0.256"),
        ({"type": "string", "format": "uri"}, "https://example.org/a/b?c#d", "example"),
        ({"type": "array", "minItems": 2}, [1, 2], [1]),
        ({"type": "array", "items": FLAG, "maxItems": 1}, [], [True, True]),
        ({"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True}, ["x", "y"], ["x", "x"]),
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, 5, 4),
        ({"type": "object", "additionalProperties": FLAG}, {"a": True}, {"a": 1}),
        ({"type": "object", "properties": {"a": FLAG}}, {}, {"b": True}),
        ({"type": "object", "properties": {}}, {}, {"b": True}),
        ({"type": "object", "properties": {"a": FLAG}, "additionalProperties": True}, {"b": 1}, {"a": 1}),
        ({"type": "object", "properties": {"a": FLAG, "b": FLAG}, "minProperties": 1}, {"b": True}, {}),
        ({"type": "string", "enum": ["ab", "c"], "minLength": 2}, "ab", "c"),
        ({"enum": [9007199254740993]}, 9007199254740993, 9007199254740992),
        ({"type": "integer", "minimum": 5}, 10**18 - 128, 10**18),
        ({"type": "integer", "maximum": 2**63 - 1}, 10**18 - 128, 10**18),
        ({"type": "number", "multipleOf": 0.1, "minimum": 0.3, "maximum": 0.3}, 0.3, 0.2),
        ({"enum": [0.3, 0.35], "multipleOf": 0.1}, 0.3, 0.35),
    ]
    for schema, right, wrong in cases:
        grammar = grammar_of(tokenizer, function("f", of({"x": schema})))
        assert is_taken(compiler, grammar, call_ids(tokenizer, "f", {"x": right})), f"{schema} takes {right!r}"
        assert not is_taken(compiler, grammar, call_ids(tokenizer, "f", {"x": wrong})), f"{schema} refuses {wrong!r}"


def test_a_long_way_through_references(tokenizer: ChatTokenizer) -> None:
    """As long as no stack is."""
    definitions = {f"d{i}": of({"next": {"$ref": f"#/$defs/d{i + 1}"}}) for i in range(900)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d900": {"type": "null"}}}
    assert "next:" in grammar_of(tokenizer, function("f", schema)).text


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/x"}}}, ".properties.a.$ref", "#/$defs/NAME"),
        ({"properties": {"a": {"$ref": "http://x/y"}}}, ".properties.a.$ref", "within the parameters"),
        ({"$ref": "#"}, "", "from a property or an item"),
        ({"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}]}}}, ".properties.a", "from a property or an item"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "", "one with an end"),
        ({"properties": {"a": False}, "required": ["a"]}, ".properties.a", "some value meets"),
        (of({"a": {"type": "integer", "minimum": 5, "maximum": 3}}), ".properties.a", "some value meets"),
        (of({"a": {"type": "string", "pattern": "^a$", "minLength": 2}}), ".properties.a", "some value meets"),
        (of({"a": {"allOf": [{"type": "string"}, {"type": "null"}]}}), ".properties.a", "some value meets"),
        (of({f"a{i}": {"type": "null"} for i in range(3000)}), None, "more than 4096 rules"),
        (of({"a": {"anyOf": [{"const": i} for i in range(600)]}}), ".properties.a", "at most 256"),
    ],
)
def test_what_no_call_can_follow_is_refused(
    tokenizer: ChatTokenizer, schema: Schema, place: str | None, words: str
) -> None:
    for is_lenient in (False, True):
        with pytest.raises(InvalidField) as caught:
            grammar_of(tokenizer, function("f", schema, is_lenient=is_lenient))
        assert caught.value.field == ("chat.tools_json" if place is None else f"f.parameters{place}")
        assert words in str(caught.value)


UNHELD: list[tuple[Schema, str, str]] = [
    ({"not": {"type": "string"}}, ".not", "keywords that can be held: type, enum"),
    ({"contains": FLAG}, ".contains", "can be held"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ".dependentRequired", "can be held"),
    ({"if": FLAG, "then": {"const": True}}, ".if", "anyOf"),
    ({"type": "array", "uniqueItems": True}, ".uniqueItems", "an enum of at most 64 values"),
    ({"type": "string", "format": "color"}, ".format", "one of date, time, date-time"),
    ({"type": "string", "pattern": "(?=a)b"}, ".pattern", "lookaround"),
    ({"type": "string", "pattern": r"\p{Foo}"}, ".pattern", "Unicode knows"),
    ({"type": "object", "patternProperties": {"(": {}}}, '.patternProperties["("]', "closing"),
    ({"oneOf": [{"type": "string"}, {"minLength": 3}]}, ".oneOf", "anyOf, or alternatives that differ"),
    (
        {"allOf": [{"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"properties": {"a": NULL, "b": NULL}}]},
        ".allOf[0].oneOf",
        "differ",
    ),
    ({"type": "object", "minProperties": 3}, ".minProperties", "at most 1"),
    ({"minimum": 2**53 + 1, "maximum": 2**53 + 1}, ".minimum", "9007199254740992, or an enum"),
    ({"type": "number", "minimum": 1e299}, ".minimum", "a number that can be held"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "place", "words"), UNHELD, ids=[place for _, place, _ in UNHELD])
def test_what_no_grammar_holds_is_refused_unless_it_may_be_left(
    compiler: GrammarCompiler, tokenizer: ChatTokenizer, schema: Schema, place: str, words: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        grammar_of(tokenizer, function("f", of({"x": schema})))
    assert caught.value.field == f"f.parameters.properties.x{place}"
    assert words in caught.value.allowed
    assert '"strict": false leaves' in caught.value.allowed
    compiler.compile(grammar_of(tokenizer, function("f", of({"x": schema}), is_lenient=True)))
