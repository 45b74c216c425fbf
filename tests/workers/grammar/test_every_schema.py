"""Every schema of the sweep, followed with drafts and without: valid, and the same ids.

Tokens are chosen by their place alone, as an engine's are; drafts are right, wrong or forbidden. That the engine's own
choice and drafters keep to the masks is `tests/workers/engine/test_structured.py`.
"""

from __future__ import annotations

import json
from random import Random

import numpy as np
import pytest

from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.embedded import embedded_path
from gemray_workers.grammar.compiler import GrammarCompiler
from gemray_workers.grammar.grammar import Grammar
from gemray_workers.grammar.run import GrammarRun, Words
from support.structured.schemas import schemas
from support.structured.sweep import STOP_IDS, is_valid

MAX_TOKENS = 200
MAX_DRAFTS = 8
CLOSING = (b'"', b"}", b"]", b"Z")


class Answering:
    """One answer under one schema."""

    def __init__(self, run: GrammarRun, name: str, closing: Words) -> None:
        self.run = run
        self.ids: list[int] = []
        self.has_ended = False
        self._name = name
        self._closing = closing

    def step(self, drafts: list[int]) -> None:
        """Take drafts up to the first that is not what would be chosen, and one token more."""
        for row, words in enumerate(self.run.allowed(drafts)):
            chosen = self._choice(words)
            if chosen in STOP_IDS:
                self.has_ended = True
                return
            self.ids.append(chosen)
            self.has_ended = self.run.take([chosen]) is not None
            if self.has_ended or row == len(drafts) or drafts[row] != chosen:
                return

    def _choice(self, words: Words) -> int:
        draw = Random(f"{self._name} {len(self.ids)}")
        soon = words & self._closing
        usable = soon if soon.any() and draw.random() < 0.5 else words
        return int(draw.choice(np.flatnonzero(np.unpackbits(usable.view(np.uint8), bitorder="little"))))


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.from_directory(embedded_path("gemray-tiny"))


def test_valid_and_equal_with_drafts(tokenizer: ChatTokenizer) -> None:
    size = tokenizer.vocab_size
    compiler = GrammarCompiler(tokenizer.grammar_vocabulary(size))
    short = [i for i in range(size) if tokenizer.bytes_of(i) in CLOSING]
    bits = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    bits[[*short, *STOP_IDS]] = 1
    closing = np.packbits(bits, bitorder="little").view(np.uint32)
    every, num_ended = schemas(), 0
    assert len(every) >= 200
    for name, schema in every.items():
        grammar = Grammar(kind="json_schema", text=json.dumps(schema))

        def answering(name: str = name, grammar: Grammar = grammar) -> Answering:
            matcher = compiler.compile(grammar)
            run = GrammarRun(matcher, thought=None, stop_token_ids=STOP_IDS, vocab_size=size)
            return Answering(run, name, closing)

        plain, drafted, draw = answering(), answering(), Random(name)
        while not plain.has_ended and len(plain.ids) < MAX_TOKENS:
            plain.step([])
        while not drafted.has_ended and len(drafted.ids) < len(plain.ids):
            right = plain.ids[len(drafted.ids) : len(drafted.ids) + draw.randint(0, MAX_DRAFTS)]
            drafted.step([draft if draw.random() < 0.8 else draw.randrange(size) for draft in right])
        assert drafted.ids[: len(plain.ids)] == plain.ids, name
        if plain.has_ended:
            num_ended += 1
            assert is_valid(tokenizer.decode(plain.ids), schema), name
    assert num_ended > 200
