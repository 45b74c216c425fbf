"""Masks: along drafts they are what they would be after the drafts; thoughts, ends and dead ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest

from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.embedded import embedded_path
from gemray_workers.grammar.compiler import MAX_CHOICES, GrammarCompiler
from gemray_workers.grammar.grammar import Grammar, GrammarKind, Thought
from gemray_workers.grammar.run import GrammarRun, Words
from gemray_workers.grammar.special_tokens import SPECIAL_TOKENS
from gemray_workers.grammar.vocabulary import END_MARK

STOPS = (1, 106, 50)
OPENS, CLOSES = SPECIAL_TOKENS["<|channel>"], SPECIAL_TOKENS["<channel|>"]
THOUGHT = Thought(opens=OPENS, closes=CLOSES)
VOCAB_SIZE = 4104
"""A few rows more than the tokenizer has ids."""


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.from_directory(embedded_path("gemray-tiny"))


@pytest.fixture(scope="module")
def compiler(tokenizer: ChatTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.grammar_vocabulary(VOCAB_SIZE))


def start(
    compiler: GrammarCompiler,
    kind: GrammarKind,
    text: str,
    *,
    thought: Thought | None = None,
    stops: Sequence[int] = STOPS,
    begins_at: int | None = None,
) -> GrammarRun:
    matcher = compiler.compile(Grammar(kind=kind, text=text))
    return GrammarRun(matcher, thought=thought, stop_token_ids=stops, vocab_size=VOCAB_SIZE, begins_at=begins_at)


def allowed_ids(words_W: Words) -> set[int]:
    return {int(i) for i in np.flatnonzero(np.unpackbits(words_W.view(np.uint8), bitorder="little"))}


def texts(tokenizer: ChatTokenizer, ids: set[int]) -> set[bytes]:
    return {tokenizer.bytes_of(token_id) for token_id in ids}


@pytest.mark.parametrize(
    ("kind", "grammar", "answer"),
    [
        ("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}',
         '{"a": 12, "b": [null]}'),
        ("json_object", "", '{"any": {"thing": [1, "two", 3.5, "漢"]}}'),
        ("regex", "[a-c]{3}(x|yy)", "abcyy"),
        ("choice", '["yes", "no", "yesterday"]', "yesterday"),
        ("lark", 'start: "a" b\nb: "c" b? "d"', "accdd"),
    ],
)  # fmt: skip
def test_masks_along_drafts_are_those_after_them(
    compiler: GrammarCompiler, tokenizer: ChatTokenizer, kind: GrammarKind, grammar: str, answer: str
) -> None:
    ids = tokenizer.encode(answer)[1:]
    run, slow = start(compiler, kind, grammar), start(compiler, kind, grammar)
    along_JW = run.allowed(ids)
    for row, token_id in enumerate(ids):
        assert token_id in allowed_ids(along_JW[row])
        np.testing.assert_array_equal(along_JW[row], slow.allowed([])[0])
        np.testing.assert_array_equal(run.allowed(ids[row:])[0], along_JW[row])  # looking moved nothing
        assert slow.take([token_id]) == (1 if row == len(ids) - 1 else None)
        run.take([token_id])


def test_rows_behind_a_forbidden_draft_forbid_nothing(compiler: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    run = start(compiler, "regex", "[a-c]{30}")
    a, z = (tokenizer.encode(letter)[1] for letter in "az")
    for forbidden in (z, 1, 106, OPENS, -1, VOCAB_SIZE, VOCAB_SIZE - 1):
        words_JW = run.allowed([a, forbidden, a])
        assert all(set(text) <= set(b"abc") for text in texts(tokenizer, allowed_ids(words_JW[1])))
        assert (words_JW[2:] == 0xFFFFFFFF).all()


def test_no_id_without_text_is_allowed(compiler: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    """Control tokens, rows beyond the tokenizer, and padding of the last word."""
    ids = allowed_ids(start(compiler, "regex", r"(.|\n){5,}").allowed([])[0])
    assert len(ids) > 3000
    assert all(tokenizer.bytes_of(token_id) for token_id in ids)


def test_stop_ids_are_allowed_where_the_text_may_end(compiler: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    one = tokenizer.encode("1")[1]
    run = start(compiler, "json_schema", '{"type": "integer"}', stops=(106, 7))
    assert not {1, 106, 7} & allowed_ids(run.allowed([])[0])
    assert run.take([one]) is None
    assert {1, 106, 7} & allowed_ids(run.allowed([])[0]) == {106, 7}  # those of the request, and no other


def test_a_thought_may_come_first(compiler: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    yes = tokenizer.encode("yes")[1:]
    choice = '["yes"]'
    assert OPENS not in allowed_ids(start(compiler, "choice", choice).allowed([])[0])
    run = start(compiler, "choice", choice, thought=THOUGHT)
    first, *thinking = [allowed_ids(words) for words in run.allowed([OPENS, 300, CLOSES, *yes[:-1]])]
    assert first - {OPENS} == thinking[2]
    assert {OPENS, yes[0]} <= first
    for ids in thinking[:2]:
        assert not ids & set(STOPS)
        assert {300, CLOSES, 500} <= ids
    assert run.take([OPENS, 300, CLOSES, *yes]) == 3 + len(yes)
    assert start(compiler, "choice", choice, thought=THOUGHT).take(yes) == len(yes)  # or none at all
    inside = start(compiler, "choice", choice, thought=Thought(opens=OPENS, closes=CLOSES, is_open=True))
    assert inside.take([300, 301]) is None
    assert inside.take([CLOSES, *yes]) == 1 + len(yes)


def test_the_mark_of_an_end_is_no_token(compiler: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    """The grammar's own sign that a text may end here: no earlier call can have given it."""
    yes = tokenizer.encode("yes")[1:]
    run = start(compiler, "choice", '["yes", "yesterday"]')
    assert run.num_allowed(yes) == run.num_allowed([*yes, END_MARK]) == len(yes)


@pytest.mark.parametrize("stop", STOPS)
def test_no_stop_token_ends_a_thought(compiler: GrammarCompiler, tokenizer: ChatTokenizer, stop: int) -> None:
    """A draft of one is no way on: nothing is asked of what is behind it, nor can an earlier call have given it."""
    run = start(compiler, "choice", '["yes"]', thought=Thought(opens=OPENS, closes=CLOSES, is_open=True))
    hm = tokenizer.encode("hm")[-1]
    drafts = [hm, stop, CLOSES]
    assert run.num_allowed(drafts) == 1
    first, second, *behind = map(allowed_ids, run.allowed(drafts))
    assert stop not in first | second
    assert all(len(ids) >= VOCAB_SIZE for ids in behind), "no token is taken from these rows"
    assert run.num_allowed([hm, CLOSES]) == 2


def test_a_part_of_an_answer_may_be_held(compiler: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    """Each time that the answer comes to the id that begins it; around it all is free, and nothing ends the answer."""
    call, end, quote = (SPECIAL_TOKENS[token] for token in ("<|tool_call>", "<tool_call|>", '<|"|>'))
    z = tokenizer.encode("z")[1]
    lark = f"start: <[{call}]> (<[{quote}]> | <[{OPENS}]>) <[{end}]>"
    run, slow = (start(compiler, "lark", lark, begins_at=call) for _ in range(2))
    everything = set(range(32 * run.num_words))
    ids = [z, OPENS, call, quote, end, z, call, OPENS, end, call]
    inside = {quote, OPENS}
    wanted = [everything] * 3 + [inside, {end}, everything, everything, inside, {end}, everything, inside]
    along = [allowed_ids(words) for words in run.allowed(ids)]
    assert along == wanted
    for token_id, may_follow in zip(ids, wanted, strict=False):
        assert allowed_ids(slow.allowed([])[0]) == may_follow
        assert slow.take([token_id]) is None
        assert slow.why_stuck(allowed=[], banned=[]) is None
    assert (run.allowed([z, call, z, quote])[3:] == 0xFFFFFFFF).all()  # behind a draft that it forbids
    assert run.take(ids) is None
    assert allowed_ids(run.allowed([])[0]) == inside


def test_lark_reaches_control_tokens(compiler: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    """The shape of a required tool call."""
    grammar = 'start: <|tool_call> /call:(f|g)\\{x:/ <[52]> /[a-z ]{1,9}/ <[52]> "}" <[49]>'
    call, quote, end = (SPECIAL_TOKENS[t] for t in ("<|tool_call>", '<|"|>', "<tool_call|>"))
    ids = [call, *tokenizer.encode("call:g{x:")[1:], quote, *tokenizer.encode("new york")[1:], quote,
           *tokenizer.encode("}")[1:], end]  # fmt: skip
    assert allowed_ids(start(compiler, "lark", grammar).allowed([])[0]) == {call}
    assert start(compiler, "lark", grammar).take(ids) == len(ids)


@pytest.mark.parametrize(
    "text", ["<turn|>b", "see <bos> here", "<|tool_call>call:a{}", "<eos>z", 'a "b"\\n\n\t/[c]|(d)*.+?^$-&~#']
)
def test_a_spelled_control_token_is_text(compiler: GrammarCompiler, tokenizer: ChatTokenizer, text: str) -> None:
    """Where a text is forced it is cut into ids as well: into those that spell it, and never into a control token."""
    forms: list[tuple[GrammarKind, str, Callable[[str], str]]] = [
        ("choice", json.dumps([text]), str),
        ("json_schema", json.dumps({"const": text}), json.loads),
    ]
    for kind, grammar, read in forms:
        run = start(compiler, kind, grammar)
        ids: list[int] = []
        while True:
            allowed = allowed_ids(run.allowed([])[0])
            assert allowed.isdisjoint(SPECIAL_TOKENS.values()), ids
            ids.append(max(allowed, key=lambda token_id: len(tokenizer.bytes_of(token_id))))
            if run.take(ids[-1:]) is not None:
                break
        assert read(tokenizer.decode(ids)) == text


def test_as_many_choices_as_may_be(compiler: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    random = Random(0)
    choices = ["".join(random.choices("abcdefgh é.|", k=40)) for _ in range(MAX_CHOICES)]
    run = start(compiler, "choice", json.dumps(choices))
    ids = tokenizer.encode(choices[-1])[1:]
    assert all(token_id in allowed_ids(words) for token_id, words in zip(ids, run.allowed(ids[:-1]), strict=True))
    assert run.take(ids) == len(ids)


def test_why_nothing_can_follow(compiler: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    a, b = (tokenizer.encode(letter)[1] for letter in "ab")
    run = start(compiler, "regex", "[a-c]{3}")
    assert run.why_stuck(allowed=(), banned=()) is None
    assert run.why_stuck(allowed=(a, 5), banned=(b,)) is None
    assert "other fields" in str(run.why_stuck(allowed=(5, 6), banned=()))
    assert "other fields" in str(run.why_stuck(allowed=(a,), banned=(a,)))


def test_a_form_that_forces_too_much_behind_a_choice_ends_there(
    compiler: GrammarCompiler, tokenizer: ChatTokenizer
) -> None:
    """Its masks would hold up every other request; only the compiler looks at what all texts begin with."""
    (x,) = tokenizer.encode("x")[1:]
    run = start(compiler, "regex", "(x|y)a{20000}")
    assert x in allowed_ids(run.allowed([])[0])
    assert not run.allowed([x])[1].any()
    assert run.take([x]) is None
    assert not run.allowed([])[0].any()
    assert str(run.why_stuck(allowed=(), banned=())) == "20000 bytes must follow here, at most 16384 may"
    assert start(compiler, "regex", "(x|y)a{16000}").allowed([x])[1].any()


def test_json_may_be_written_over_lines_but_not_padded_without_end(
    compiler: GrammarCompiler, tokenizer: ChatTokenizer
) -> None:
    value = {"a": [1, {"b": None}], "c": "x"}
    for text in (json.dumps(value), json.dumps(value, indent=4), json.dumps(value, separators=(",", ":"))):
        ids = tokenizer.encode(text)[1:]
        assert start(compiler, "json_object", "").take(ids) == len(ids)
    run = start(compiler, "json_object", "")
    assert run.take(tokenizer.encode("{")[1:]) is None
    spaces = [token_id for token_id in range(VOCAB_SIZE) if tokenizer.bytes_of(token_id) == b" "][:1]
    assert run.take(spaces * 2) is None
    assert spaces[0] not in allowed_ids(run.allowed([])[0])
