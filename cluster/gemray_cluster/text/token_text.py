"""What single tokens say, for log-probabilities: a token may be a part of a character, or a control token."""

from __future__ import annotations

from functools import cached_property

from gemray_cluster.text.tokenizer import ChatTokenizer


class TokenText:
    """Texts of the tokens of one tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, token_id: int) -> tuple[str, bytes]:
        """(text, bytes where the text does not tell them). A token without text of its own has its spelling; a row of
        the model beyond the tokenizer has nothing."""
        raw = self._tokenizer.bytes_of(token_id)
        if not raw:
            return (self._tokenizer.spelling_of(token_id) if token_id < self._tokenizer.vocab_size else ""), b""
        try:
            return raw.decode(), b""
        except UnicodeDecodeError:
            return raw.decode(errors="replace"), raw

    @cached_property
    def most_bytes(self) -> int:
        """Most that text and bytes of a token take together."""
        pairs = (self.of(token_id) for token_id in range(self._tokenizer.vocab_size))
        return max(len(text.encode()) + len(raw) for text, raw in pairs)
