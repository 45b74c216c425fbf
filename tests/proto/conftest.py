"""Fixtures of the client's tests."""

from __future__ import annotations

import pytest

from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.text import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """A trained tokenizer of Gemma's kind, with a chat template."""
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
