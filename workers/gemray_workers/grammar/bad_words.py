"""Token sequences that no answer holds: the last id of one is forbidden where those before it were just generated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemray_workers.grammar.run import GrammarRun, Words, clear, everything


class BadWords:
    """The sequences of one request; what was generated is told with each question, so nothing here moves."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        """Each of at least two ids."""
        self._by_last_but_one: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for *beginning, last in sequences:
            self._by_last_but_one.setdefault(beginning[-1], []).append((tuple(beginning), last))
        self.reach = max(map(len, sequences), default=1) - 1
        """Newest ids that can matter."""

    def forbidden(self, generated: Sequence[int]) -> set[int]:
        """Ids that may not come next."""
        if not generated:
            return set()
        return {
            last
            for beginning, last in self._by_last_but_one.get(generated[-1], ())
            if tuple(generated[-len(beginning) :]) == beginning
        }


def allowed_words(
    grammar: GrammarRun | None,
    bad_words: BadWords | None,
    *,
    generated: Sequence[int],
    drafts: Sequence[int],
    num_words: int,
) -> Words:
    """Bits of the ids that may come next, then of those that may behind each draft [J, W].

    Args:
        grammar: has taken every generated token.
        bad_words: of the request.
        generated: the newest tokens of the answer, at least as many as the bad words reach.
        drafts: what is proposed behind them.
        num_words: W, 32-bit words of the vocabulary's bits; a grammar may know fewer, and allows no id beyond them.
    """
    words_JW = everything(1 + len(drafts), num_words)
    if grammar is not None:
        own_JW = grammar.allowed(drafts)
        words_JW[:, : own_JW.shape[1]] = own_JW
        words_JW[:, own_JW.shape[1] :] = np.uint32(0)
    if bad_words is not None:
        ids = [*generated, *drafts]
        for row in range(1 + len(drafts)):
            for token_id in bad_words.forbidden(ids[: len(generated) + row]):
                clear(words_JW[row], token_id)
    return words_JW
