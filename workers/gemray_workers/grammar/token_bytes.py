"""The bytes that each id stands for, read off the tokenizer's decoder."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from tokenizers import Tokenizer

from gemray_workers.errors import CheckpointError


def bytes_of_tokens(backend: Tokenizer, hidden: Collection[int], source: str) -> list[bytes]:
    """Apply the tokenizer's decoder to each token alone; the `hidden` ones have no bytes. Raises CheckpointError.

    That is exact for Gemma's decoder (replace the space mark, join byte tokens, concatenate), whose steps look at one
    token at a time; any other kind of decoder is refused rather than approximated.
    """
    replacements, byte_fallback = _decoder_steps(backend, source)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    token_bytes = [b""] * (max(vocabulary.values()) + 1)
    for token, token_id in vocabulary.items():
        if token_id not in hidden:
            token_bytes[token_id] = _token_bytes(token, replacements, byte_fallback)
    return token_bytes


def _token_bytes(token: str, replacements: Sequence[tuple[str, str]], byte_fallback: bool) -> bytes:
    if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    for pattern, content in replacements:
        token = token.replace(pattern, content)
    return token.encode("utf-8")


def _decoder_steps(backend: Tokenizer, source: str) -> tuple[list[tuple[str, str]], bool]:
    """The literal replacements of the decoder, in order, and whether it joins byte tokens."""
    decoder: dict[str, Any] = (
        json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    )
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    literal = all("String" in step["pattern"] for step in steps if step["type"] == "Replace")
    if not set(kinds) <= {"Replace", "ByteFallback", "Fuse"} or not literal:
        raise CheckpointError(
            f"the tokenizer in {source} decodes with {' + '.join(kinds)}; "
            "only literal Replace, ByteFallback and Fuse (the Gemma decoder) are known"
        )
    replacements = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    return replacements, "ByteFallback" in kinds
