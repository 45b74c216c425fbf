"""What would change a prompt's ids without a word: settings that training leaves in a tokenizer file, and ids that
the library gives out otherwise than the file says."""

from __future__ import annotations

import logging
from pathlib import Path

from tokenizers import Tokenizer

from gemray_workers.checkpoint.json_file import read_json_object
from gemray_workers.errors import CheckpointError

logger = logging.getLogger(__name__)


def switch_off_silent_changes(backend: Tokenizer, source: str) -> None:
    """Make the ids those of the whole text and of nothing else; each setting that is switched off is logged."""
    if backend.truncation is not None:
        _tell(source, f"cuts texts to {backend.truncation['max_length']} tokens")
        backend.no_truncation()
    if backend.padding is not None:
        _tell(source, f"pads texts with {backend.padding['pad_token']}")
        backend.no_padding()
    # A copy of the model shares it, so that setting an attribute of one is seen by both.
    if getattr(backend.model, "dropout", None):
        _tell(source, f"leaves out merges at random (dropout {backend.model.dropout:g})")
        backend.model.dropout = None
    if backend.encode_special_tokens:
        _tell(source, "cuts control tokens apart (split_special_tokens)")
        backend.encode_special_tokens = False


def check_ids(backend: Tokenizer, file: Path) -> None:
    """Compare ids with those that a tokenizer.json states; raises CheckpointError.

    The library numbers added tokens itself, on from the largest id, so that one behind a gap gets another id.
    """
    content = read_json_object(file)
    added = content.get("added_tokens") or []
    for token, stated in [(entry["content"], entry["id"]) for entry in added]:
        given = backend.token_to_id(token)
        if given != stated:
            raise CheckpointError(f"{file}: added token {token!r} has id {stated}, but is loaded as {given}")


def _tell(source: str, what: str) -> None:
    logger.warning("the tokenizer in %s %s, as set for training: switched off, prompts are taken whole", source, what)
