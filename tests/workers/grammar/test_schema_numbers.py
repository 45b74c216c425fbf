"""Numbers that doubles would change are refused with their place; steps are held as they are written."""

from __future__ import annotations

import pytest

from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.embedded import embedded_path
from gemray_workers.errors import InvalidField
from gemray_workers.grammar.compiler import GrammarCompiler
from gemray_workers.grammar.grammar import Grammar
from gemray_workers.grammar.schema_numbers import is_multiple, widen_bounds


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.from_directory(embedded_path("gemray-tiny"))


@pytest.fixture(scope="module")
def compiler(tokenizer: ChatTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.grammar_vocabulary(tokenizer.vocab_size))


@pytest.mark.parametrize(
    ("schema", "place", "allowed"),
    [
        ('{"const": 9007199254740993}', "#/const", "an integer from -9007199254740992 to 9007199254740992"),
        ('{"const": -18446744073709551615}', "#/const", "an integer"),
        ('{"items": {"enum": ["a", {"b": [9007199254740993]}]}}', "#/items/enum/1/b/0", "an integer"),
        ('{"type": "integer", "minimum": 9007199254740993}', "#/minimum", "an integer"),
        ('{"type": "integer", "maximum": -9223372036854775808}', "#/maximum", "an integer"),
        ('{"const": {"maximum": 9007199254740993}}', "#/const/maximum", "an integer"),
        ('{"const": 1e400}', "#/const", "a finite number"),
        ('{"const": {"a/b": [NaN]}}', "#/const/a~1b/0", "a finite number"),
        ('{"enum": [1, -Infinity]}', "#/enum/1", "a finite number"),
    ],
)
def test_numbers_that_cannot_be_held(compiler: GrammarCompiler, schema: str, place: str, allowed: str) -> None:
    with pytest.raises(InvalidField) as caught:
        compiler.compile(Grammar(kind="json_schema", text=schema))
    assert caught.value.field == f"structured.json_schema{place}"
    assert allowed in caught.value.allowed


@pytest.mark.parametrize(
    ("schema", "text", "is_taken"),
    [
        ('{"const": 9007199254740992}', "9007199254740992", True),
        ('{"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807}', "-17", True),
        ('{"type": "integer", "minimum": 0, "maximum": 9223372036854775807}', "9007199254740992", True),
        ('{"type": "integer", "minimum": 0, "maximum": 9223372036854775807}', "9007199254740993", False),
        ('{"type": "number", "multipleOf": 0.1, "minimum": 0.3, "maximum": 0.3}', "0.3", True),
        ('{"type": "number", "multipleOf": 0.1, "minimum": 0.3, "maximum": 0.3}', "0.2", False),
        ('{"type": "number", "multipleOf": 0.1, "minimum": 0.3, "maximum": 0.3}', "0.4", False),
        ('{"type": "number", "multipleOf": 0.1, "minimum": 0.3, "maximum": 0.3}', "0.31", False),
        ('{"type": "number", "multipleOf": 0.1, "minimum": 0.3, "maximum": 0.4}', "0.3", True),
        ('{"type": "number", "multipleOf": 0.1, "minimum": 0.3, "maximum": 0.4}', "0.5", False),
    ],
)
def test_numbers_that_are_held(
    compiler: GrammarCompiler, tokenizer: ChatTokenizer, schema: str, text: str, is_taken: bool
) -> None:
    matcher = compiler.compile(Grammar(kind="json_schema", text=schema))
    ids = tokenizer.encode(text)[1:]
    assert (matcher.validate_tokens(ids) == len(ids)) == is_taken


def test_bounds_lie_between_multiples() -> None:
    assert widen_bounds({"multipleOf": 0.5, "minimum": 0.5, "exclusiveMaximum": 2}) == {
        "multipleOf": 0.5,
        "minimum": 0.25,
        "maximum": 1.75,
    }
    for kept in ({"multipleOf": 3, "minimum": 1}, {"multipleOf": 0.5, "minimum": 0.6, "maximum": 0.9}, {"minimum": 1}):
        assert widen_bounds(kept) == kept
    assert is_multiple(0.3, 0.1)
    assert not is_multiple(0.35, 0.1)
