"""Settings that training leaves in tokenizer files never change a prompt: they are switched off and told."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.errors import CheckpointError
from support.checkpoints.tiny_tokenizer import write_tiny_tokenizer
from support.cluster.text import MULTILINGUAL

TRUNCATION = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 2000},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<pad>",
}
PROMPT = f"{MULTILINGUAL} the printer says that names are bound to objects " * 60
CHAT: list[dict[str, Any]] = [{"role": "user", "content": PROMPT + "<turn|>"}]


def in_tokenizer(**fields: Any) -> Callable[[Path], None]:
    return lambda directory: _edit(directory / "tokenizer.json", lambda content: content | fields)


def _edit(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text(encoding="utf-8")))), encoding="utf-8")


def with_dropout(directory: Path) -> None:
    _edit(directory / "tokenizer.json", lambda content: content | {"model": content["model"] | {"dropout": 0.5}})


def with_split_tokens(directory: Path) -> None:
    _edit(directory / "tokenizer_config.json", lambda content: content | {"split_special_tokens": True})


def with_ends(directory: Path) -> None:
    """What transformers would put around a text; a prompt's <bos> is gemray's own."""
    _edit(directory / "tokenizer_config.json", lambda content: content | {"add_bos_token": True, "add_eos_token": True})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param(in_tokenizer(truncation=TRUNCATION), "cuts texts to 16 tokens", id="truncation"),
        pytest.param(in_tokenizer(padding=PADDING), "pads texts with <pad>", id="padding"),
        pytest.param(
            in_tokenizer(padding=PADDING | {"strategy": "BatchLongest", "pad_to_multiple_of": 64}),
            "pads texts",
            id="padding to a multiple",
        ),
        pytest.param(with_dropout, "dropout 0.5", id="dropout"),
        pytest.param(with_split_tokens, "split_special_tokens", id="split special tokens"),
        pytest.param(with_ends, "", id="ends"),
    ],
)
def test_a_prompt_is_taken_whole(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Path], None],
    told: str,
) -> None:
    write_tiny_tokenizer(tmp_path, vocab_size=700)
    clean = ChatTokenizer.from_directory(tmp_path)
    change(tmp_path)
    with caplog.at_level(logging.WARNING):
        tokenizer = ChatTokenizer.from_directory(tmp_path)
    assert len(clean.encode(PROMPT)) > 1491
    assert tokenizer.encode(PROMPT) == clean.encode(PROMPT)
    assert tokenizer.encode("Hi") == clean.encode("Hi")
    assert tokenizer.encode_chat(CHAT) == clean.encode_chat(CHAT)
    assert told in caplog.text
    assert ("switched off" in caplog.text) == bool(told)


def test_an_added_token_that_is_loaded_under_another_id_is_named(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, vocab_size=700)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}

    def add(content: dict[str, Any]) -> dict[str, Any]:
        return content | {"added_tokens": [*content["added_tokens"], {"id": 5000, "content": "<|new|>", **flags}]}

    _edit(tmp_path / "tokenizer.json", add)
    with pytest.raises(CheckpointError, match=r"'<\|new\|>' has id 5000, but is loaded as 699"):
        ChatTokenizer.from_directory(tmp_path)
