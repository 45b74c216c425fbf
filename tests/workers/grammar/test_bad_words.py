"""Which ids would complete a bad word, and how that joins a grammar."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gemray_workers.embedded import embedded_path
from gemray_workers.grammar.bad_words import BadWords, allowed_words
from gemray_workers.grammar.compiler import GrammarCompiler
from gemray_workers.grammar.grammar import Grammar
from gemray_workers.grammar.run import GrammarRun
from gemray_workers.grammar.vocabulary import vocabulary_of_directory

NUM_WORDS = 2
few = st.integers(0, 3)
sequences = st.lists(st.lists(few, min_size=2, max_size=4).map(tuple), min_size=1, max_size=6)


@given(words=sequences, generated=st.lists(few, max_size=8), drafts=st.lists(few, max_size=4))
def test_what_is_left_completes_no_bad_word(
    words: list[tuple[int, ...]], generated: list[int], drafts: list[int]
) -> None:
    bad = BadWords(words)
    newest = generated[max(0, len(generated) - bad.reach) :]
    words_JW = allowed_words(None, bad, generated=newest, drafts=drafts, num_words=NUM_WORDS)
    assert words_JW.shape == (1 + len(drafts), NUM_WORDS)
    for row, words_W in enumerate(words_JW):
        bits = np.unpackbits(words_W.astype("<u4").view(np.uint8), bitorder="little")
        text = [*generated, *drafts[:row]]
        for token_id in range(32 * NUM_WORDS):
            whole = (*text, token_id)
            ends = any(whole[-len(word) :] == word for word in words)
            assert bits[token_id] == (not ends), (text, token_id)


def test_a_grammar_and_bad_words_hold_together() -> None:
    path = embedded_path("gemray-tiny")
    config = json.loads((path / "config.json").read_text())
    vocab_size = config.get("text_config", config)["vocab_size"]
    vocabulary = vocabulary_of_directory(str(path), vocab_size)
    assert vocabulary is not None
    compiler = GrammarCompiler(vocabulary)
    (a,), (b,) = (vocabulary.tokenize_str(char) for char in "ab")
    run = GrammarRun(
        compiler.compile(Grammar(kind="regex", text="[ab]{3}")),
        thought=None,
        stop_token_ids=(),
        vocab_size=compiler.vocab_size,
    )
    num_words = run.num_words + 1  # of a padded vocabulary
    both = allowed_words(run, BadWords([(a, b)]), generated=[], drafts=[a, a], num_words=num_words)
    alone = run.allowed([a, a])
    np.testing.assert_array_equal(both[0, :-1], alone[0])
    for row in (1, 2):
        assert alone[row, b // 32] >> np.uint32(b % 32) & 1
        assert not both[row, b // 32] >> np.uint32(b % 32) & 1
        assert both[row, a // 32] >> np.uint32(a % 32) & 1
    assert not both[:, -1].any()
