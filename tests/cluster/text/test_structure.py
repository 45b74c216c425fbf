"""Thoughts, answer and calls are told by token ids: however ids are grouped, and wherever an output ends in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray_cluster.text.detokenizer import Detokenizer
from gemray_cluster.text.output import Ending, OutputRules, OutputStream
from gemray_cluster.text.structure import open_thought_of
from gemray_cluster.text.tokenizer import SPECIAL_TOKENS, ChatTokenizer
from gemray_workers.messages import SequenceDelta
from support.cluster.calls import arguments, call_ids, chunks, thought_ids
from support.cluster.text import byte_ids

OPEN, CLOSE, CALL, END_CALL = (
    SPECIAL_TOKENS[token] for token in ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>")
)
QUOTE, RESPONSE, TURN_END = (SPECIAL_TOKENS[token] for token in ('<|"|>', "<|tool_response>", "<turn|>"))


@dataclass
class Call:
    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass
class Whole:
    """A client's view of a whole output."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ending: Ending | None = None
    num_reasoning_tokens: int = 0


def run(
    tokenizer: ChatTokenizer,
    ids: Sequence[int],
    sizes: Sequence[int] = (1,),
    *,
    stops: Sequence[str] = (),
    stop_id: int | None = None,
    open_thought: str | None = None,
    show_stop: bool = False,
    show_special: bool = False,
) -> Whole:
    """Deltas of these sizes, joined as a client joins them; `stop_id` ends the ids, else a budget does."""
    rules = OutputRules(stops=tuple(stops), show_stop=show_stop, show_special=show_special)
    output = OutputStream(Detokenizer(tokenizer), rules, open_thought=open_thought)
    whole = Whole()
    groups = list(chunks([*ids, *([] if stop_id is None else [stop_id])], sizes))
    for index, group in enumerate(groups):
        is_last = index == len(groups) - 1
        finish: Any = ("length" if stop_id is None else "stop_token") if is_last else None
        piece = output.push(
            SequenceDelta(request_id="r", token_ids=group, finish=finish, matched_stop_id=stop_id if is_last else None)
        )
        whole.text += piece.text
        whole.reasoning += piece.reasoning
        whole.token_ids += piece.token_ids
        for call in piece.calls:
            if call.name is not None:
                assert call.index == len(whole.calls)
                whole.calls.append(Call(call.name))
            whole.calls[call.index].arguments += call.arguments
            whole.calls[call.index].is_complete |= call.is_complete
        if piece.ending is not None:
            whole.ending = piece.ending
            break
    whole.num_reasoning_tokens = output.num_reasoning_tokens
    return whole


texts = st.text(alphabet="ab {<|漢👩\u200d\u0301", max_size=6)
names = st.from_regex(r"[a-z_.]{1,8}", fullmatch=True)
parts = st.lists(
    st.one_of(
        st.tuples(st.just("text"), texts),
        st.tuples(st.just("thought"), texts),
        st.tuples(st.just("call"), st.tuples(names, arguments)),
    ),
    max_size=5,
)
size_lists = st.lists(st.integers(1, 7), min_size=1, max_size=5)


def ids_of(tokenizer: ChatTokenizer, output: list[tuple[str, Any]]) -> list[int]:
    ids: list[int] = []
    for kind, content in output:
        if kind == "text":
            ids += byte_ids(tokenizer, content.encode())
        elif kind == "thought":
            ids += thought_ids(tokenizer, content)
        else:
            ids += call_ids(tokenizer, *content)
    return ids


@settings(max_examples=200)
@given(output=parts, sizes=size_lists)
def test_any_chunks_give_what_the_model_meant(
    tokenizer: ChatTokenizer, output: list[tuple[str, Any]], sizes: list[int]
) -> None:
    ids = ids_of(tokenizer, output)
    whole = run(tokenizer, ids, sizes, stop_id=TURN_END)
    assert whole.token_ids == [*ids, TURN_END]
    assert whole.text == "".join(content for kind, content in output if kind == "text")
    assert whole.reasoning == "".join(content for kind, content in output if kind == "thought")
    meant = [content for kind, content in output if kind == "call"]
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == meant
    assert all(call.is_complete for call in whole.calls)
    assert whole.ending == Ending("tool_call" if meant else "stop_token", stop_token_id=TURN_END)
    thoughts = [content for kind, content in output if kind == "thought"]
    assert whole.num_reasoning_tokens == sum(len(thought_ids(tokenizer, content)) for content in thoughts)


@settings(max_examples=200)
@given(
    output=parts,
    sizes=size_lists,
    cut=st.integers(1, 60),
    stops=st.lists(st.text(alphabet="ab {:漢👩", min_size=1, max_size=2), max_size=2),
)
def test_an_output_may_end_anywhere(
    tokenizer: ChatTokenizer, output: list[tuple[str, Any]], sizes: list[int], cut: int, stops: list[str]
) -> None:
    """At any token and at any stop string, inside thoughts, calls and characters: the same in any chunks."""
    ids = ids_of(tokenizer, output)[:cut] or [107]
    one_by_one = run(tokenizer, ids, stops=stops)
    assert run(tokenizer, ids, sizes, stops=stops) == one_by_one
    uncut = run(tokenizer, ids)
    if one_by_one.ending == Ending("length"):
        assert one_by_one == uncut
    assert uncut.reasoning.startswith(one_by_one.reasoning)
    for stop in stops:
        assert stop not in one_by_one.reasoning
    for call in one_by_one.calls:
        if call.is_complete:
            json.loads(call.arguments)
        else:
            with pytest.raises(json.JSONDecodeError):
                json.loads(call.arguments)


@settings(max_examples=200)
@given(
    ids=st.lists(
        st.one_of(st.integers(108, 363), st.sampled_from([OPEN, CLOSE, CALL, END_CALL, QUOTE, RESPONSE, 105, 106, 5]))
    ),
    sizes=size_lists,
)
def test_random_ids_lose_nothing_and_never_fail(tokenizer: ChatTokenizer, ids: list[int], sizes: list[int]) -> None:
    ids = ids or [107]
    whole = run(tokenizer, ids, sizes)
    assert whole == run(tokenizer, ids)
    assert whole.token_ids == ids
    assert whole.num_reasoning_tokens <= len(ids)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_one_block_closes_a_call_and_opens_another(tokenizer: ChatTokenizer, size: int) -> None:
    ids = [*call_ids(tokenizer, "a", {"x": 1}), *call_ids(tokenizer, "b", {"y": "Z"}), RESPONSE]
    whole = run(tokenizer, ids[:-1], [size], stop_id=RESPONSE)
    assert whole.calls == [Call("a", '{"x":1}', True), Call("b", '{"y":"Z"}', True)]
    assert whole.ending == Ending("tool_call", stop_token_id=RESPONSE)


def test_text_that_spells_the_tokens_is_text(tokenizer: ChatTokenizer) -> None:
    spelled = "<|tool_call>call:a{}<tool_call|><|channel>thought\nx<channel|>"
    whole = run(tokenizer, byte_ids(tokenizer, spelled.encode()))
    assert (whole.text, whole.reasoning, whole.calls) == (spelled, "", [])


@pytest.mark.parametrize(
    ("written", "text"),
    [(b"no call", "no call"), (b"{}", "{}"), (b"x" * 400, "x" * 400), (b"a", "a")],
)
def test_what_is_no_call_is_text(tokenizer: ChatTokenizer, written: bytes, text: str) -> None:
    whole = run(tokenizer, [CALL, *byte_ids(tokenizer, written), END_CALL], stop_id=TURN_END)
    assert (whole.text, whole.calls) == (text, [])
    assert whole.ending == Ending("stop_token", stop_token_id=TURN_END)


@pytest.mark.parametrize("written", [b"call:", b"call:a b", b"call:a b{x:1}", b"call:{", b"call:" + b"x" * 400 + b"{"])
def test_notation_of_a_call_without_a_name_is_no_text(tokenizer: ChatTokenizer, written: bytes) -> None:
    whole = run(tokenizer, [CALL, *byte_ids(tokenizer, written), END_CALL, *byte_ids(tokenizer, b"!")])
    assert (whole.text, whole.calls) == ("!", [])


@settings(max_examples=100)
@given(name=names, cut=st.integers(0, 20), sizes=size_lists, stop=st.sampled_from(["", "ca", "l:", ":", "\x00"]))
def test_a_call_that_ends_before_its_arguments_is_not_told(
    tokenizer: ChatTokenizer, name: str, cut: int, sizes: list[int], stop: str
) -> None:
    """By the budget, a stop string or a stop token, anywhere in the name."""
    written = f"call:{name}"
    text, call = byte_ids(tokenizer, "漢".encode()), byte_ids(tokenizer, written.encode())
    ids = [*text, CALL, *call[: min(cut, len(call))]]
    for stop_id in (None, RESPONSE):
        whole = run(tokenizer, ids, sizes, stop_id=stop_id, stops=[stop] if stop else [])
        assert (whole.text, whole.reasoning, whole.calls) == ("漢", "", [])
    stops = [name[at:] for at in range(len(name))][-1 - cut % len(name) :][:1]
    whole = run(tokenizer, [*text, CALL, *call], sizes, stops=stops)
    assert (whole.text, whole.calls) == ("漢", [])
    assert whole.ending == Ending("stop_string", stop_string=stops[0])


@pytest.mark.parametrize("length", range(len("thought\n")))
def test_a_thought_that_ends_in_its_header_is_not_told(tokenizer: ChatTokenizer, length: int) -> None:
    whole = run(tokenizer, [OPEN, *byte_ids(tokenizer, b"thought\n"[:length])])
    assert (whole.text, whole.reasoning) == ("", "")


def test_a_call_without_arguments(tokenizer: ChatTokenizer) -> None:
    whole = run(tokenizer, [CALL, *byte_ids(tokenizer, b"call:now"), END_CALL], stop_id=RESPONSE)
    assert whole.calls == [Call("now", "{}", True)]


def test_a_call_may_go_without_its_last_token(tokenizer: ChatTokenizer) -> None:
    """A model that goes from the brace to its stop token has called; one that stops before the brace has not."""
    ids = call_ids(tokenizer, "a", {"x": 1})
    assert run(tokenizer, ids[:-1], stop_id=RESPONSE).ending == Ending("tool_call", stop_token_id=RESPONSE)
    whole = run(tokenizer, ids[:-2], stop_id=RESPONSE)
    assert whole.ending == Ending("stop_token", stop_token_id=RESPONSE)
    assert [call.is_complete for call in whole.calls] == [False]


def test_a_call_inside_a_thought_is_a_call(tokenizer: ChatTokenizer) -> None:
    thought = thought_ids(tokenizer, "ab")
    whole = run(tokenizer, [*thought[:-2], *call_ids(tokenizer, "f", {}), *thought[-2:]])
    assert (whole.reasoning, whole.text, whole.calls) == ("ab", "", [Call("f", "{}", True)])


def test_an_unfinished_character_stays_where_it_was(tokenizer: ChatTokenizer) -> None:
    first, second, third = byte_ids(tokenizer, "漢".encode())
    whole = run(tokenizer, [OPEN, first, second, CLOSE, third, *byte_ids(tokenizer, b"!")])
    assert (whole.reasoning, whole.text) == ("\ufffd", "\ufffd!")


def test_a_stop_string_does_not_reach_from_a_thought_into_the_answer(tokenizer: ChatTokenizer) -> None:
    ids = [*thought_ids(tokenizer, "xa"), *byte_ids(tokenizer, b"b ab")]
    whole = run(tokenizer, ids, stops=["ab"])
    assert (whole.reasoning, whole.text) == ("xa", "b ")
    assert whole.ending == Ending("stop_string", stop_string="ab")


@pytest.mark.parametrize("size", [1, 3, 64])
@pytest.mark.parametrize("stop", ["\n", "thought", "ht\na", "t", "call", "ll:f", ":"])
def test_a_stop_string_is_not_looked_for_in_what_is_hidden(tokenizer: ChatTokenizer, stop: str, size: int) -> None:
    ids = [*thought_ids(tokenizer, "ab"), *byte_ids(tokenizer, b"hm "), *call_ids(tokenizer, "f", {})]
    whole = run(tokenizer, ids, [size], stop_id=RESPONSE, stops=[stop])
    assert (whole.reasoning, whole.text, whole.calls) == ("ab", "hm ", [Call("f", "{}", True)])
    assert whole.ending == Ending("tool_call", stop_token_id=RESPONSE)


@pytest.mark.parametrize("begun", ["", "tho", "thought\n"])
def test_a_stop_string_is_not_looked_for_in_a_heading_that_the_prompt_begins(
    tokenizer: ChatTokenizer, begun: str
) -> None:
    ids = byte_ids(tokenizer, "thought\na thought".removeprefix(begun).encode())
    whole = run(tokenizer, ids, stops=["ought"], open_thought=begun)
    assert (whole.reasoning, whole.ending) == ("a th", Ending("stop_string", stop_string="ought"))


def test_a_stop_string_ends_what_is_no_heading(tokenizer: ChatTokenizer) -> None:
    whole = run(tokenizer, [OPEN, *byte_ids(tokenizer, b"thxought"), CLOSE], stops=["ought"])
    assert (whole.reasoning, whole.ending) == ("thx", Ending("stop_string", stop_string="ought"))
    whole = run(tokenizer, [CALL, *byte_ids(tokenizer, b"cab"), END_CALL], stops=["b"])
    assert whole.ending == Ending("stop_string", stop_string="b")


def test_a_stop_string_that_spells_control_tokens_may_spell_the_heading(tokenizer: ChatTokenizer) -> None:
    ids = [*byte_ids(tokenizer, b"ab"), *thought_ids(tokenizer, "cd")]
    whole = run(tokenizer, ids, stops=["b<|channel>thought\nc"])
    assert (whole.text, whole.reasoning) == ("a", "")


@pytest.mark.parametrize(
    ("stop", "told"),
    [
        ("unit", "{"),
        ("it:", '{"unit":'),
        ("cel", '{"unit":"cel'),
        ("elsius", '{"unit":"celsius'),
        ("12", '{"unit":"celsius","days":'),
    ],
)
def test_arguments_hold_a_stop_string_that_is_included_where_they_tell_it(
    tokenizer: ChatTokenizer, stop: str, told: str
) -> None:
    """They are JSON: a key or a number is written when it is over, a string as it comes."""
    ids = call_ids(tokenizer, "f", {"unit": "celsius", "days": 123})
    whole = run(tokenizer, ids, stops=[stop], show_stop=True)
    assert [(call.arguments, call.is_complete) for call in whole.calls] == [(told, False)]


@pytest.mark.parametrize("stop", ["Par", "{ci", "ty:Pa"])
def test_a_stop_string_inside_arguments_leaves_them_incomplete(tokenizer: ChatTokenizer, stop: str) -> None:
    whole = run(tokenizer, call_ids(tokenizer, "f", {"city": "Paris"}), stops=[stop])
    assert whole.ending == Ending("stop_string", stop_string=stop)
    assert not any(call.is_complete for call in whole.calls)
    assert "Par" not in "".join(call.arguments for call in whole.calls)


@pytest.mark.parametrize(
    ("header", "rest", "reasoning"),
    [("", b"thought\nab", "ab"), ("thou", b"ght\nab", "ab"), ("thought\n", b"ab", "ab")],
)
def test_the_prompt_may_begin_the_thought(tokenizer: ChatTokenizer, header: str, rest: bytes, reasoning: str) -> None:
    ids = [*byte_ids(tokenizer, rest), CLOSE, *byte_ids(tokenizer, b"c")]
    whole = run(tokenizer, ids, open_thought=header)
    assert (whole.reasoning, whole.text, whole.num_reasoning_tokens) == (reasoning, "c", len(ids) - 1)


@pytest.mark.parametrize(
    ("prompt", "start"),
    [([2, OPEN, 7, 105, 7], None), ([2, OPEN, 7, CLOSE], None), ([2, 105, OPEN, 7], 3), ([2], None)],
)
def test_what_a_prompt_leaves_open(tokenizer: ChatTokenizer, prompt: list[int], start: int | None) -> None:
    assert open_thought_of(prompt, tokenizer.control_ids) == start


@settings(max_examples=100)
@given(output=parts, sizes=size_lists, stops=st.lists(st.text(alphabet="ab {漢", min_size=1, max_size=2), max_size=2))
def test_special_tokens_and_stop_strings_shown(
    tokenizer: ChatTokenizer, output: list[tuple[str, Any]], sizes: list[int], stops: list[str]
) -> None:
    """The text of all tokens, as it stands, up to and with the first stop string."""
    ids = ids_of(tokenizer, output)
    spellings = tokenizer.control_spellings
    text = b"".join(spellings.get(token_id, "").encode() or tokenizer.bytes_of(token_id) for token_id in ids).decode()
    whole = run(tokenizer, ids, sizes, stop_id=TURN_END, stops=stops, show_stop=True, show_special=True)
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    assert whole.text == text[: min(ends, default=len(text))]
    assert (whole.reasoning, whole.calls) == ("", [])
    assert (whole.ending == Ending("stop_token", stop_token_id=TURN_END)) == (not ends)


@pytest.mark.parametrize("size", [1, 3, 9])
def test_a_stop_string_shown_with_a_control_token_in_it(tokenizer: ChatTokenizer, size: int) -> None:
    ids = [*byte_ids(tokenizer, b"xab"), CLOSE, *byte_ids(tokenizer, b"cd")]
    whole = run(tokenizer, ids, [size], stops=["b<channel|>c"], show_stop=True)
    assert (whole.text, whole.ending) == ("xabc", Ending("stop_string", stop_string="b<channel|>c"))
