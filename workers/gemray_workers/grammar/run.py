"""Where one request stands in its grammar, by the ids that were decided, and which ids it allows next.

Shape legend: J rows of a sequence (the next token, and one behind each draft), W 32-bit words of the vocabulary's bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum, auto

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from gemray_workers.grammar.forced_bytes import MAX_FORCED_BYTES, num_forced_bytes
from gemray_workers.grammar.grammar import Thought
from gemray_workers.grammar.reasons import first_line
from gemray_workers.grammar.vocabulary import END_MARK

Words = NDArray[np.uint32]
ALL = np.uint32(0xFFFFFFFF)


class _Part(Enum):
    """What the next token belongs to."""

    START = auto()
    """The constrained part, or a thought before it."""
    THOUGHT = auto()
    FREE = auto()
    """Whatever lies around constrained parts."""
    ANSWER = auto()


class GrammarRun:
    """Follows the tokens of one request. Looking along drafts changes nothing here."""

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        thought: Thought | None,
        stop_token_ids: Collection[int],
        vocab_size: int,
        begins_at: int | None = None,
    ) -> None:
        """At the first token behind the prompt.

        Args:
            matcher: has seen nothing yet.
            thought: what may stand before the constrained part.
            stop_token_ids: of the request: allowed where the grammar allows the text to end.
            vocab_size: ids of the model.
            begins_at: id that begins the constrained part each time, where the rest is free.
        """
        self._matcher = matcher
        self._unused = matcher if begins_at is None else matcher.deep_copy()
        self._begins_at = begins_at
        self._thought = thought
        self._stops = frozenset(stop_token_ids)
        self._vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        self._part = _Part.ANSWER if thought is None else _Part.THOUGHT if thought.is_open else _Part.START
        if begins_at is not None:
            self._part = _Part.FREE

    def take(self, token_ids: Sequence[int]) -> int | None:
        """Move past ids that were decided; how many of them complete the text, or None if more may follow.

        A stop id is not part of the text: whoever calls has ended it there.
        """
        for count, token_id in enumerate(token_ids, start=1):
            self._part, self._matcher, is_taken = self._step(self._matcher, self._part, token_id)
            if not is_taken:
                return None
            if self._part is _Part.ANSWER and self._matcher.is_stopped() and not self._matcher.is_error():
                return count
        return None

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these ids, from the first on, may come next, one behind the other. Nothing moves."""
        part, matcher = self._part, self._matcher.deep_copy()
        for place, token_id in enumerate(token_ids):
            part, matcher, is_taken = self._step(matcher, part, token_id)
            if not is_taken:
                return place
        return len(token_ids)

    def allowed(self, drafts: Sequence[int]) -> Words:
        """Bits of the ids that may come next, then of those that may behind each draft [J, W].

        Behind a draft that the grammar forbids every id is allowed: no token is taken from such a row.
        """
        words_JW = everything(1 + len(drafts), self.num_words)
        part, matcher = self._part, self._matcher.deep_copy() if drafts else self._matcher
        words_JW[0] = self._mask(matcher, part)
        for row, draft in enumerate(drafts, start=1):
            part, matcher, is_taken = self._step(matcher, part, draft)
            if not is_taken or (part is _Part.ANSWER and matcher.is_stopped()):
                break
            words_JW[row] = self._mask(matcher, part)
        return words_JW

    def why_stuck(self, *, allowed: Collection[int], banned: Collection[int]) -> str | None:
        """Why no token can follow, for the client; None when the grammar is not the cause.

        Args:
            allowed: ids that the request's other fields leave; none of them means all.
            banned: ids that they forbid.
        """
        if (
            self._part not in (_Part.THOUGHT, _Part.FREE)
            and (forced := num_forced_bytes(self._matcher)) > MAX_FORCED_BYTES
        ):
            return f"{forced} bytes must follow here, at most {MAX_FORCED_BYTES} may"
        if self._matcher.is_error():
            return f"its masks take more work than a grammar may: {first_line(self._matcher.get_error())}"
        usable_W = words_of(allowed, self.num_words) if allowed else np.full(self.num_words, ALL, dtype=np.uint32)
        usable_W &= ~words_of(banned, self.num_words)
        if not np.any(self._mask(self._matcher, self._part) & usable_W):
            return "no token that it allows here is allowed by the request's other fields"
        return None

    def _step(self, matcher: LLMatcher, part: _Part, token_id: int) -> tuple[_Part, LLMatcher, bool]:
        """(part behind the id, the matcher there, whether the id may stand there)."""
        if part is _Part.FREE:
            if token_id != self._begins_at:
                return part, matcher, True
            matcher = self._unused.deep_copy()  # `reset` leaves something of what was seen
        elif part is not _Part.ANSWER:
            assert self._thought is not None
            if part is _Part.THOUGHT:
                part = _Part.ANSWER if token_id == self._thought.closes else part
                return part, matcher, token_id not in self._stops
            if token_id == self._thought.opens:
                return _Part.THOUGHT, matcher, True
        is_id = 0 <= token_id < self._vocab_size and token_id != END_MARK
        is_taken = is_id and matcher.try_consume_tokens([token_id]) == 1
        is_over = self._begins_at is not None and matcher.is_stopped() and not matcher.is_error()
        return _Part.FREE if is_over else _Part.ANSWER, matcher, is_taken

    def _mask(self, matcher: LLMatcher, part: _Part) -> Words:
        """[W]; nothing when the matcher has given up, or would take too much work."""
        if part is _Part.FREE:
            return np.full(self.num_words, ALL, dtype=np.uint32)
        if part is _Part.THOUGHT:
            words_W = np.full(self.num_words, ALL, dtype=np.uint32)
            for token_id in self._stops:
                _set(words_W, token_id, False)
            return words_W
        if num_forced_bytes(matcher) > MAX_FORCED_BYTES:
            return np.zeros(self.num_words, dtype=np.uint32)
        words_W = np.frombuffer(matcher.compute_bitmask(), dtype="<u4")[: self.num_words].astype(np.uint32)
        if matcher.is_error():
            return np.zeros(self.num_words, dtype=np.uint32)
        may_end = _get(words_W, END_MARK)
        _set(words_W, END_MARK, False)
        if may_end:
            for token_id in self._stops:
                _set(words_W, token_id, True)
        if part is _Part.START:
            assert self._thought is not None
            _set(words_W, self._thought.opens, True)
        return words_W


def everything(num_rows: int, num_words: int) -> Words:
    """Bits that allow every id [num_rows, num_words]."""
    return np.full((num_rows, num_words), ALL, dtype=np.uint32)


def clear(words_W: Words, token_id: int) -> None:
    """Forbid an id; one beyond the words is passed over."""
    if token_id < 32 * len(words_W):
        _set(words_W, token_id, False)


def words_of(token_ids: Collection[int], num_words: int) -> Words:
    """Bits of these ids."""
    words_W = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        if token_id < 32 * num_words:
            _set(words_W, token_id, True)
    return words_W


def _get(words_W: Words, token_id: int) -> bool:
    return bool(words_W[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))


def _set(words_W: Words, token_id: int, value: bool) -> None:
    bit = np.uint32(1 << token_id % 32)
    words_W[token_id // 32] = words_W[token_id // 32] | bit if value else words_W[token_id // 32] & ~bit
