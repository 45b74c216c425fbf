"""Control tokens, and text that only spells them.

A chat template writes control tokens (turns, channels, tools) around what people wrote. Text of people that spells one
must stay text, or a message could end its own turn and begin one of the system's. So the first character of each
spelling is marked before the template runs, by a character that does not occur in the request, and the marks are taken
out again behind
it: where they stood, the text is cut into tokens as if no control token existed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gemray_cluster.text.spellings import pattern_of
from gemray_workers.errors import InvalidField, Summary

CHANNEL_TOKENS = ("<|channel>", "<channel|>")
"""Around a thought. Templates look for them in earlier answers, to leave thoughts out."""
ANSWERING_ROLES = ("assistant", "model")
_SPACE = re.compile(r"\s*")
_FIRST_MARK, _LAST_MARK = 0xE000, 0xF8FF
"""Code points for private use: no template's whitespace, case or syntax rules touch them."""


@dataclass(frozen=True)
class RenderedText:
    """A text, and where in it a control token is spelled by people: those are text."""

    text: str
    spelled_at: frozenset[int] = frozenset()

    def up_to(self, stop: int) -> RenderedText:
        """Its first `stop` characters."""
        return RenderedText(self.text[:stop], frozenset(at for at in self.spelled_at if at < stop))


@dataclass(frozen=True)
class Marks:
    """For each first character of a control token, one character that does not occur in the request."""

    mark_of: Mapping[str, str]
    pattern: re.Pattern[str]
    """A control token; its first character is marked."""

    def put_into(self, text: str, *, but_not: Sequence[str] = ()) -> str:
        """`text` with its marks, if it spells a control token. Tokens of `but_not` keep their first characters."""
        if self.pattern.search(text) is None:
            return text
        # Every such character, not only those that begin a token: what a template leaves out may bring others together.
        table = {ord(char): mark for char, mark in self.mark_of.items()}
        if not but_not:
            return text.translate(table)
        parts = re.split("(" + "|".join(map(re.escape, but_not)) + ")", text)  # texts, and between them tokens to keep
        return "".join(part if index % 2 else part.translate(table) for index, part in enumerate(parts))

    def take_out_of(self, text: str) -> RenderedText:
        """The text as it was spelled, and where the marks stood."""
        marks = re.finditer("[" + "".join(self.mark_of.values()) + "]", text)
        spelled_at = frozenset(mark.start() for mark in marks)
        return RenderedText(text.translate({ord(mark): char for char, mark in self.mark_of.items()}), spelled_at)


class ControlTokens:
    """The control tokens of one tokenizer."""

    def __init__(self, backend: Tokenizer, ids: Mapping[str, int]) -> None:
        """`ids` are the tokens to tell apart; `backend` cuts all other text."""
        self._ids = dict(ids)
        self._control_ids = frozenset(ids.values())
        self._pattern = pattern_of(ids)
        flags = backend.get_added_tokens_decoder()
        self._flags = {token: flags[token_id] for token, token_id in ids.items()}
        # A permanent copy: switching the one in use would change what other threads encode.
        self._plain: Tokenizer = Tokenizer.from_str(backend.to_str())
        self._plain.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ids])
        self._plain.encode_special_tokens = True

    def are_spelled_in(self, texts: Sequence[str]) -> bool:
        """Whether some text spells one."""
        return any(self._pattern.search(text) for text in texts)

    def marks_for(self, texts: Sequence[str]) -> Marks:
        """Marks that none of the texts uses; raises InvalidField when they use them all."""
        used = set().union(*map(set, texts))
        free = (chr(point) for point in range(_FIRST_MARK, _LAST_MARK + 1) if chr(point) not in used)
        first_chars = sorted({token[0] for token in self._ids})
        mark_of = dict(zip(first_chars, free, strict=False))
        if len(mark_of) < len(first_chars):
            raise InvalidField("chat", Summary("every private-use character"), "text that leaves one of them unused")
        return Marks(mark_of, self._pattern)

    def count(self, rendered: RenderedText, tokens: Sequence[str]) -> int:
        """How often some of `tokens` stand in a text as control tokens."""
        found = pattern_of(tokens).finditer(rendered.text)
        return sum(match.start() not in rendered.spelled_at for match in found)

    def encode(self, rendered: RenderedText) -> list[int]:
        """The ids of a text whose spelled control tokens are text; raises InvalidField if they can't be written so."""
        pieces = list(self._pieces(rendered))
        texts = [rendered.text[start:stop] for start, stop, token_id in pieces if token_id is None and start < stop]
        encoded = iter(self._plain.encode_batch_fast(texts, add_special_tokens=False))
        ids: list[int] = []
        for start, stop, token_id in pieces:
            if token_id is not None:
                ids.append(token_id)
            elif start < stop:
                piece = next(encoded).ids
                if not self._control_ids.isdisjoint(piece):
                    raise InvalidField(
                        "chat",
                        Summary.of_text(rendered.text[start:stop]),
                        "text that spells no control token: this tokenizer cannot write one as text",
                    )
                ids += piece
        return ids

    def _pieces(self, rendered: RenderedText) -> Iterator[tuple[int, int, int | None]]:
        """(start, stop, id) of each control token, and with no id of each text between them, in order."""
        text, done, at = rendered.text, 0, 0
        while match := self._pattern.search(text, at):
            start, stop = match.span()
            if start in rendered.spelled_at:
                at = start + 1
                continue
            token = match.group()
            if self._flags[token].lstrip:
                start = done + len(text[done:start].rstrip())
            if self._flags[token].rstrip:
                stop = _SPACE.match(text, stop).end()  # type: ignore[union-attr]
            yield done, start, None
            yield start, stop, self._ids[token]
            done = at = stop
        yield done, len(text), None


def unused_mark(texts: Sequence[str]) -> str:
    """The last private-use character that no text holds; raises InvalidField when they hold them all."""
    used = set().union(*map(set, texts))
    for point in range(_LAST_MARK, _FIRST_MARK - 1, -1):
        if chr(point) not in used:
            return chr(point)
    raise InvalidField("chat", Summary("every private-use character"), "text that leaves one of them unused")


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """JSON content with each text in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_texts(entry, change) for entry in value]
    if isinstance(value, dict):
        return {change(key): map_texts(entry, change) for key, entry in value.items()}
    return value


def texts_of(value: Any) -> list[str]:
    """Each text in JSON content, keys too."""
    found: list[str] = []
    map_texts(value, lambda text: found.append(text) or text)  # type: ignore[func-returns-value]
    return found
