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

from gemray_cluster.text.call_grammar import call_grammar
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

TREE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["value"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
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
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.from_directory(embedded_path("gemray-tiny"))


@pytest.fixture(scope="module")
def compiler(tokenizer: ChatTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.grammar_vocabulary(tokenizer.vocab_size))


def grammar_of(tokenizer: ChatTokenizer, *tools: dict[str, Any], several: bool = False) -> Grammar:
    return Grammar(kind="lark", text=call_grammar(tools, tokenizer.control_ids, several=several))


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


@settings(deadline=None, max_examples=60)
@given(value=st.dictionaries(keys, values, max_size=3), left_out=st.booleans())
def test_what_fits_is_taken(compiler: GrammarCompiler, tokenizer: ChatTokenizer, value: Any, left_out: bool) -> None:
    assume(not re.search(r"e-\d{3}", json.dumps(value)))  # a grammar's exponents have two digits
    schema = schema_of(value)
    if left_out:
        value = {key: inner for key, inner in value.items() if key in schema["required"]}
    tool = {"name": "f", "parameters": schema}
    assert is_taken(compiler, grammar_of(tokenizer, tool), call_ids(tokenizer, "f", value))


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_what_is_taken_fits(compiler: GrammarCompiler, tokenizer: ChatTokenizer, schema: dict[str, Any]) -> None:
    """Random walks along the masks, read as an answer is."""
    draw = random.Random(7)
    plain = json.loads(json.dumps(schema).replace("STRING", "string"))
    if plain.get("properties", {}).get("n", {}).pop("nullable", False):
        plain["properties"]["n"]["type"] = ["integer", "null"]
    grammar = grammar_of(tokenizer, {"type": "function", "function": {"name": "f", "parameters": schema}})
    for _ in range(8):
        matcher, ids = compiler.compile(grammar), list[int]()
        while not matcher.is_stopped() and len(ids) < 400:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            allowed = [int(i) for i in np.flatnonzero(bits) if i != END_MARK]
            short = [i for i in allowed if i == QUOTE or tokenizer.bytes_of(i) in (b"}", b"]")]
            ids.append(draw.choice(short if short and draw.random() < 0.5 else allowed))
            assert matcher.try_consume_tokens(ids[-1:]) == 1
        assert matcher.is_stopped(), "the walk ends"
        output = OutputStream(Detokenizer(tokenizer), OutputRules())
        delta = SequenceDelta(request_id="r", token_ids=ids, finish="grammar")
        pieces = output.push(delta).calls
        assert [piece.name for piece in pieces if piece.name is not None] == ["f"]
        assert pieces[-1].is_complete
        jsonschema.validate(json.loads("".join(piece.arguments for piece in pieces)), plain)


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_no_rule_is_stated_for_nothing(tokenizer: ChatTokenizer, schema: dict[str, Any]) -> None:
    text = grammar_of(tokenizer, {"name": "f", "parameters": schema}).text
    for name in re.findall(r"^(r\d+):", text, re.MULTILINE):
        assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{name} is used nowhere"


def test_calls_of_several_functions(compiler: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    tools: list[dict[str, Any]] = [{"name": "f"}, {"name": "get.weather", "parameters": SCHEMAS[2]}]
    f, weather = call_ids(tokenizer, "f", {}), call_ids(tokenizer, "get.weather", {"city": "Paris"})
    several = grammar_of(tokenizer, *tools, several=True)
    assert all(is_taken(compiler, several, ids) for ids in (f, weather, weather + f + weather))
    one = grammar_of(tokenizer, *tools)
    assert is_taken(compiler, one, weather)
    wrong = [f + f, [], call_ids(tokenizer, "g", {}), call_ids(tokenizer, "f", {"a": 1}), weather[:-1],
             call_ids(tokenizer, "get.weather", {"city": 1}), call_ids(tokenizer, "get.weather", {})]  # fmt: skip
    assert not any(is_taken(compiler, one, ids) for ids in wrong)
    matcher = compiler.compile(one)
    assert matcher.try_consume_tokens([SPECIAL_TOKENS["<|tool_call>"]]) == 1
    assert matcher.try_consume_tokens(tokenizer.encode("hello")[1:]) == 0


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"name": "f g"}, r"chat.tools_json\[0\].name = 'f g'"),
        ({"name": "f", "parameters": {"properties": {"a": {"type": "strin"}}}}, "'strin' is not allowed: a type of"),
        ({"name": "f", "parameters": {"properties": {"a": {"$ref": "#/$defs/x"}}}}, "references within the schema"),
        ({"name": "f", "parameters": {"properties": {"a": {"$ref": "http://x/y"}}}}, "references within the schema"),
        ({"name": "f", "parameters": {"$ref": "#"}}, "references to schemas of objects"),
        ({"name": "f", "parameters": {"properties": {"a": False}}}, "some value meets"),
        ({"name": "f", "parameters": {"properties": {f"a{i}": {} for i in range(3000)}}}, "more than 4096 rules"),
    ],
)
def test_what_no_call_can_follow_is_refused(tokenizer: ChatTokenizer, tool: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidField, match=words):
        call_grammar([tool], tokenizer.control_ids, several=True)
