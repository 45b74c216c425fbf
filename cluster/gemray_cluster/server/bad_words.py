"""Texts that an answer does not hold, as token sequences."""

from __future__ import annotations

from dataclasses import dataclass

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.errors import InvalidField, Summary


@dataclass(frozen=True)
class BadWordIds:
    """Each sequence once."""

    single: tuple[int, ...] = ()
    """Ids that are a bad word by themselves."""
    several: tuple[tuple[int, ...], ...] = ()
    """Bad words of more than one token."""


def read_bad_words(sampling: pb.SamplingParameters, tokenizer: ChatTokenizer, vocab_size: int) -> BadWordIds:
    """The words as the tokenizer writes them, with and without a space in front; raises InvalidField.

    Their number and lengths are checked already.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(sampling.bad_words):
        if not word.strip():
            raise InvalidField(f"sampling.bad_words[{index}]", Summary.of_text(word), "text that is not blank")
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text)[1:])  # less the beginning of a sequence
            if ids and max(ids) < vocab_size:  # the model never gives the others
                sequences[ids] = None
    return BadWordIds(
        single=tuple(ids[0] for ids in sequences if len(ids) == 1),
        several=tuple(ids for ids in sequences if len(ids) > 1),
    )
