"""The tokenizer as llguidance sees it: the bytes of every id, and how a text that is forced is cut into ids."""

from __future__ import annotations

from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer

from gemray_workers.errors import CheckpointError
from gemray_workers.grammar.special_tokens import SPECIAL_TOKENS, hidden_ids
from gemray_workers.grammar.token_bytes import bytes_of_tokens

END_MARK: int = SPECIAL_TOKENS["<eos>"]
"""Stands in a mask for "the text may end here": which ids end a text is each request's own matter."""
_SPECIAL_PREFIX = b"\xff"
"""No text holds this byte, so a grammar reaches such a token only by its name or id."""


def grammar_vocabulary(backend: Tokenizer, vocab_size: int, source: str) -> LLTokenizer:
    """Build it: 1.5 s for 262,144 ids, in which no other thread of the process runs, and 130 MiB.

    Args:
        backend: the checkpoint's tokenizer.
        vocab_size: ids that the model has a row for.
        source: named in errors.

    Raises:
        CheckpointError: the tokenizer is not of Gemma's kind.
    """
    return LLTokenizer(TokenizerWrapper(_Wrapped(backend, vocab_size, source)), n_vocab=vocab_size)


def vocabulary_of_directory(model_path: str, vocab_size: int) -> LLTokenizer | None:
    """As `grammar_vocabulary`, from a checkpoint; None when it has no tokenizer."""
    path = Path(model_path) / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # whatever a malformed file makes the library raise
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    return grammar_vocabulary(backend, vocab_size, model_path)


class _Wrapped:
    """What llguidance asks of a tokenizer."""

    eos_token_id = END_MARK
    bos_token_id = SPECIAL_TOKENS["<bos>"]
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, backend: Tokenizer, vocab_size: int, source: str) -> None:
        hidden = hidden_ids(backend)
        # Text that spells a control token is text, in an answer as in a prompt. A copy: the one in use cuts prompts.
        self._plain: Tokenizer = Tokenizer.from_str(backend.to_str())
        names = [str(backend.id_to_token(token_id)) for token_id in sorted(hidden)]
        self._plain.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
        self._plain.encode_special_tokens = True
        token_bytes = bytes_of_tokens(backend, hidden, source)[:vocab_size]
        self.tokens = [
            _SPECIAL_PREFIX + str(backend.id_to_token(token_id)).encode() if token_id in hidden else token
            for token_id, token in enumerate(token_bytes)
        ]
        # Rows of the model that the tokenizer knows nothing of have no bytes: no grammar allows them.
        self.tokens += [b""] * (vocab_size - len(self.tokens))

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("texts, not bytes")  # llguidance tries which of them it may give
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids
