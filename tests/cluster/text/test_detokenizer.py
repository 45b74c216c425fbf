"""Pieces add up to the whole, and none ends inside a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray_cluster.text.detokenizer import Detokenizer
from gemray_cluster.text.tokenizer import BOS_ID, ChatTokenizer
from support.cluster.text import MULTILINGUAL, VOCAB_SIZE, byte_ids


def pieces_of(tokenizer: ChatTokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def reference(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    """The tokenizers library's own decode of the whole."""
    return tokenizer._backend.decode(ids, skip_special_tokens=True)


@settings(max_examples=300)
@given(text=st.text())
def test_pieces_add_up_to_the_library_decode(tokenizer: ChatTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == reference(tokenizer, ids)
    assert pieces[-1] == "", "nothing is left when the text ends with a whole character"


def test_multilingual_text_never_shows_half_a_character(tokenizer: ChatTokenizer) -> None:
    text = MULTILINGUAL.replace("\ufffd", "")
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
def test_any_ids_add_up_to_their_decode(tokenizer: ChatTokenizer, ids: list[int]) -> None:
    text = "".join(pieces_of(tokenizer, ids))
    assert text == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert text == reference(tokenizer, ids)


@settings(max_examples=300)
@given(data=st.binary(max_size=30))
def test_any_bytes_decode_as_utf8_with_replacement(tokenizer: ChatTokenizer, data: bytes) -> None:
    assert "".join(pieces_of(tokenizer, byte_ids(tokenizer, data))) == data.decode("utf-8", errors="replace")


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_incomplete_tail_is_replaced_once(tokenizer: ChatTokenizer, cut: int) -> None:
    ids = byte_ids(tokenizer, "👩".encode()[:cut])
    assert pieces_of(tokenizer, ids) == [""] * cut + ["\ufffd"]


def test_a_real_replacement_character_is_shown_at_once(tokenizer: ChatTokenizer) -> None:
    assert pieces_of(tokenizer, byte_ids(tokenizer, "\ufffd".encode())) == ["", "", "\ufffd", ""]


def test_special_tokens_are_hidden_even_inside_a_character(tokenizer: ChatTokenizer) -> None:
    first, second, third = byte_ids(tokenizer, "漢".encode())
    ids = [BOS_ID, first, 106, second, 105, third, 1]
    assert "".join(pieces_of(tokenizer, ids)) == "漢" == reference(tokenizer, ids)


def test_leading_space_stays(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode(" a b")[1:]
    assert "".join(pieces_of(tokenizer, ids)) == " a b"
