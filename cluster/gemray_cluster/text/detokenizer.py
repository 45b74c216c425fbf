"""Token ids to text, piece by piece, never ending inside a character.

`tokenizers.decoders.DecodeStream` was tried first and does not fit: it cannot flush (a sequence that ends inside a
character would lose its last bytes), and one invalid byte turns its whole run of byte tokens into U+FFFD, characters
already sent included, so its pieces do not add up to any decode of the whole. Here the bytes of each token go through
one incremental UTF-8 decoder, which makes "pieces add up to the whole" true by construction: for valid UTF-8 the
text is that of `tokenizers`, and an invalid or unfinished sequence gives U+FFFD once.
"""

from __future__ import annotations

import codecs

from gemray_cluster.text.tokenizer import ChatTokenizer


class Detokenizer:
    """Text of one growing sequence."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._tokenizer.bytes_of(token_id))

    def control_of(self, token_id: int) -> str:
        """How a control token is spelled; nothing for others."""
        return self._tokenizer.control_spellings.get(token_id, "")

    def spells_control(self, text: str) -> bool:
        """Whether a text spells a control token."""
        return self._tokenizer.spells_control(text)

    def flush(self) -> str:
        """The end of the text: U+FFFD when it ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)
