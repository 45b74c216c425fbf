"""Ids, text and log-probabilities end together, however the engine grouped its tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray_cluster.text.detokenizer import Detokenizer
from gemray_cluster.text.output import Ending, OutputPiece, OutputRules, OutputStream
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.messages import FinishReason, SequenceDelta
from gemray_workers.sampling.token_logprob import TokenLogprob
from support.cluster.text import byte_ids


def deltas(
    ids: list[int], sizes: list[int], *, finish: FinishReason, stop_id: int | None = None
) -> list[SequenceDelta]:
    result, start, turn = [], 0, 0
    while start < len(ids):
        end = min(len(ids), start + sizes[turn % len(sizes)])
        is_last = end == len(ids)
        result.append(
            SequenceDelta(
                request_id="r",
                token_ids=ids[start:end],
                logprobs=[TokenLogprob(token_id, -float(index)) for index, token_id in enumerate(ids[start:end])],
                finish=finish if is_last else None,
                matched_stop_id=stop_id if is_last else None,
            )
        )
        start, turn = end, turn + 1
    return result


def collect(
    output: OutputStream, stream: list[SequenceDelta]
) -> tuple[list[int], str, Ending | None, list[OutputPiece]]:
    pieces: list[OutputPiece] = []
    for delta in stream:
        pieces.append(output.push(delta))
        if pieces[-1].ending is not None:
            break
    ids = [token_id for piece in pieces for token_id in piece.token_ids]
    return ids, "".join(piece.text for piece in pieces), pieces[-1].ending, pieces


def output(tokenizer: ChatTokenizer, stops: list[str], min_tokens: int = 0) -> OutputStream:
    return OutputStream(Detokenizer(tokenizer), OutputRules(stops=tuple(stops), min_tokens=min_tokens))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_stop_string_in_the_middle_of_a_step(tokenizer: ChatTokenizer, size: int) -> None:
    ids = byte_ids(tokenizer, b"ab ha ha tail")
    found, text, ending, pieces = collect(output(tokenizer, [" ha ha"]), deltas(ids, [size], finish="length"))
    assert text == "ab"
    assert found == byte_ids(tokenizer, b"ab ha ha"), "ids end with the token that completed the stop string"
    assert ending == Ending("stop_string", stop_string=" ha ha")
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_earliest_event_wins(tokenizer: ChatTokenizer, size: int) -> None:
    """The stop string is complete before the stop id: the id is not reached. And the other way round."""
    ids = [*byte_ids(tokenizer, b"xSTOP"), 106]
    assert collect(output(tokenizer, ["STOP"]), deltas(ids, [size], finish="stop_token", stop_id=106))[:3] == (
        ids[:-1],
        "x",
        Ending("stop_string", stop_string="STOP"),
    )
    ids = [*byte_ids(tokenizer, b"xSTO"), 106]
    assert collect(output(tokenizer, ["STOP"]), deltas(ids, [size], finish="stop_token", stop_id=106))[:3] == (
        ids,
        "xSTO",
        Ending("stop_token", stop_token_id=106),
    )


def test_a_thought_inside_a_thought_has_no_heading(tokenizer: ChatTokenizer) -> None:
    """What would be one is shown as part of the thought, so stop strings are found there."""
    ids = [100, *byte_ids(tokenizer, b"thought\nhm"), 100, *byte_ids(tokenizer, b"thought\ntail")]
    for stops, reasoning in (([], "hmthought\ntail"), (["ought"], "hmth")):
        _, _, ending, pieces = collect(output(tokenizer, stops), deltas(ids, [1], finish="length"))
        assert "".join(piece.reasoning for piece in pieces) == reasoning
        assert ending == (Ending("stop_string", stop_string="ought") if stops else Ending("length"))


def test_stop_string_on_the_last_token_of_the_budget(tokenizer: ChatTokenizer) -> None:
    ids = byte_ids(tokenizer, b"xSTOP")
    *_, ending, _ = collect(output(tokenizer, ["STOP"]), deltas(ids, [2], finish="length"))
    assert ending == Ending("stop_string", stop_string="STOP")


def test_a_stop_token_with_text_is_not_shown(tokenizer: ChatTokenizer) -> None:
    ids = byte_ids(tokenizer, b"ab!")
    assert collect(output(tokenizer, []), deltas(ids, [3], finish="stop_token", stop_id=ids[-1]))[:2] == (ids, "ab")


@pytest.mark.parametrize("finish", ["length", "stop_token"])
def test_unfinished_character_at_the_end(tokenizer: ChatTokenizer, finish: FinishReason) -> None:
    ids = byte_ids(tokenizer, b"a\xe6\xbc")
    if finish == "stop_token":
        ids.append(1)
    found, text, *_ = collect(output(tokenizer, []), deltas(ids, [1], finish=finish, stop_id=1))
    assert (found, text) == (ids, "a\ufffd")


def test_min_tokens_passes_over_stop_strings(tokenizer: ChatTokenizer) -> None:
    ids = byte_ids(tokenizer, b"ababab")
    assert collect(output(tokenizer, ["b"], min_tokens=3), deltas(ids, [4], finish="length"))[:2] == (ids[:4], "aba")


@settings(max_examples=300)
@given(
    data=st.text(alphabet="ab漢👩", max_size=12),
    stops=st.lists(st.text(alphabet="ab漢", min_size=1, max_size=3), max_size=2),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    min_tokens=st.integers(0, 6),
)
def test_grouping_changes_nothing(
    tokenizer: ChatTokenizer, data: str, stops: list[str], sizes: list[int], min_tokens: int
) -> None:
    ids = [*byte_ids(tokenizer, data.encode()), 106]
    one_by_one = collect(output(tokenizer, stops, min_tokens), deltas(ids, [1], finish="stop_token", stop_id=106))
    grouped = collect(output(tokenizer, stops, min_tokens), deltas(ids, sizes, finish="stop_token", stop_id=106))
    assert grouped[:3] == one_by_one[:3]
    assert "\ufffd" not in grouped[1]
    if not stops:
        assert grouped[:2] == (ids, data)


SCRIPTS = [
    *("a", "b", " ", "\n", "é", "e\u0301", "漢", "가", "\u1100\u1161", "नि", "क्ष", "ا", "\u200f", "ไ", "👩", "\u200d"),
    *("👩\u200d👧", "🇨🇿", "👍🏽", "\ufe0f", "\U00020000", "\x00", "\ufffd"),
]
"""Letters, marks that join the one before, characters of two to four bytes, and sequences of them."""


def cut_by_hand(text: str, stops: list[str]) -> tuple[str, str | None, int]:
    """(the text before the stop string that is complete first, that string, characters up to its end)."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop, end
    return text, None, len(text)


@settings(max_examples=300)
@given(
    written=st.lists(st.tuples(st.sampled_from(SCRIPTS), st.booleans()), max_size=14),
    stops=st.lists(st.lists(st.sampled_from(SCRIPTS), min_size=1, max_size=3).map("".join), max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
def test_all_scripts_end_at_the_first_stop_string(
    tokenizer: ChatTokenizer, written: list[tuple[str, bool]], stops: list[str], sizes: list[int]
) -> None:
    """Written by tokens of one or several characters or by single bytes, cut anywhere between them."""
    ids: list[int] = []
    for piece, by_bytes in written:
        ids += byte_ids(tokenizer, piece.encode()) if by_bytes else tokenizer.encode(piece)[1:]
    text = "".join(piece for piece, _ in written)
    wanted, stop, end = cut_by_hand(text, stops)
    found, shown, ending, _ = collect(
        output(tokenizer, stops), deltas([*ids, 106], sizes, finish="stop_token", stop_id=106)
    )
    assert shown == wanted
    if stop is None:
        assert (found, ending) == ([*ids, 106], Ending("stop_token", stop_token_id=106))
        return
    assert ending == Ending("stop_string", stop_string=stop)
    assert found == ids[: len(found)]
    detokenizer = Detokenizer(tokenizer)
    num_before = sum(len(detokenizer.push(token_id)) for token_id in found[:-1])
    assert num_before < end <= num_before + len(detokenizer.push(found[-1])), "the last token completes it"
