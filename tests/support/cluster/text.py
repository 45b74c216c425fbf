"""Tokenizers and texts for the front end's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemray_cluster.text.tokenizer import ChatTokenizer
from support.checkpoints.tiny_tokenizer import write_tiny_tokenizer

VOCAB_SIZE = 2048

MULTILINGUAL = "ďábelské ódy 👩‍👩‍👧 漢字かな交じり文 ½ 🇨🇿 e\u0301 \ufffd naïve\n\n  tab\tend "


def tiny_tokenizer(directory: Path) -> ChatTokenizer:
    """Train a small one into `directory` and load it as a server would."""
    write_tiny_tokenizer(directory, vocab_size=VOCAB_SIZE)
    return ChatTokenizer.from_directory(directory)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """A trained tokenizer of Gemma's kind, with a chat template; a conftest.py imports it."""
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def byte_ids(tokenizer: ChatTokenizer, data: bytes) -> list[int]:
    """The byte-fallback tokens of `data`."""
    first = tokenizer.token_bytes.index(b"\x00")
    return [first + byte for byte in data]
