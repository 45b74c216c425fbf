"""README, ARCHITECTURE and the protocol promise no more than each dtype keeps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", ["README.md", "ARCHITECTURE.md", "proto/gemray/v1/generation.proto"])
def test_the_documents_say_so(file: str) -> None:
    text = re.sub(r"\s+(//\s*)?", " ", (ROOT / file).read_text(encoding="utf-8"))
    assert "nothing else" not in text[: text.index("bfloat16")], "no promise without its exception"
    for words in ("float64", "float32", "bfloat16", "near ties", "always|without exception"):
        assert re.search(words, text), words
