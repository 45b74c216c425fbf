"""Encoding: one <bos>, the checkpoint's own template, ids as Gemma has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gemray_cluster.text.tokenizer import BOS_ID, SPECIAL_TOKENS, ChatTokenizer
from gemray_workers.errors import CheckpointError, InvalidField
from support.checkpoints.tiny_tokenizer import write_tiny_tokenizer
from support.cluster.text import MULTILINGUAL, VOCAB_SIZE

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("text", ["", "Hi", "<bos>Hi", " leading space", MULTILINGUAL])
def test_exactly_one_bos(tokenizer: ChatTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == BOS_ID
    assert ids.count(BOS_ID) == 1


def test_chat_has_one_bos_and_gemma_turns(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode_chat(HI, enable_thinking=True)
    assert ids.count(BOS_ID) == 1
    turn, end = SPECIAL_TOKENS["<|turn>"], SPECIAL_TOKENS["<turn|>"]
    assert ids[:2] == [BOS_ID, turn]
    assert ids.count(turn) == ids.count(end) + 1, "the last turn is the model's, still open"


def test_template_without_bos_gets_one(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, vocab_size=600)
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text().replace("{{- bos_token -}}", ""))
    ids = ChatTokenizer.from_directory(tmp_path).encode_chat(HI)
    assert ids[:2] == [BOS_ID, SPECIAL_TOKENS["<|turn>"]]


def test_template_sees_tools_and_thinking(tokenizer: ChatTokenizer) -> None:
    tools = [{"name": "clock", "parameters": {}}]
    plain = tokenizer.render_chat(HI, tools=None, enable_thinking=None)
    rich = tokenizer.render_chat(HI, tools=tools, enable_thinking=True)
    assert plain.text == "<bos><|turn>user\nHi<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    assert rich.text == (
        "<bos><|turn>system\n<|think|>\n"
        '<|tool>{"name": "clock", "parameters": {}}<tool|><turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n'
    )


def test_template_refusal_names_the_field(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(InvalidField, match="unknown role clown"):
        tokenizer.encode_chat([{"role": "clown", "content": "Hi"}])


def test_checkpoint_without_template(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, vocab_size=600)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InvalidField, match="no chat template"):
        ChatTokenizer.from_directory(tmp_path).encode_chat(HI)


@settings(max_examples=200)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="▁<")))
def test_decode_gives_the_text_back(tokenizer: ChatTokenizer, text: str) -> None:
    """Texts that name no special token and hold no space mark."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gemma_tokenizer_class_reads_the_same_file(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    """Published checkpoints name GemmaTokenizer, which builds its own pipeline around the file."""
    write_tiny_tokenizer(tmp_path, vocab_size=VOCAB_SIZE)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": "GemmaTokenizer"}))
    named = ChatTokenizer.from_directory(tmp_path)
    assert named.token_bytes == tokenizer.token_bytes
    assert named.encode(MULTILINGUAL) == tokenizer.encode(MULTILINGUAL)


def test_rows_beyond_the_tokenizer_have_no_text(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size, tokenizer.vocab_size + 5]) == ""


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        ChatTokenizer.from_directory(tmp_path)


def test_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, vocab_size=600)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        ChatTokenizer.from_directory(tmp_path)


def test_a_tokenizer_without_a_part_is_named(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, vocab_size=600)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match="cannot be loaded: 'added_tokens' is missing"):
        ChatTokenizer.from_directory(tmp_path)


def test_wrong_special_ids_are_named(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, vocab_size=600)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("<turn|>", "<other|>"))
    with pytest.raises(CheckpointError, match=r"<turn\|> is missing, expected 106"):
        ChatTokenizer.from_directory(tmp_path)


def test_unknown_decoder_is_refused(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, vocab_size=600)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert isinstance(backend.model, models.BPE)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="ByteLevel"):
        ChatTokenizer.from_directory(tmp_path)


def test_a_broken_chat_template_is_found_at_once(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, vocab_size=600)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content | no_such_filter }}")
    with pytest.raises(CheckpointError, match=r"cannot write a chat of one message.*no_such_filter"):
        ChatTokenizer.from_directory(tmp_path)
