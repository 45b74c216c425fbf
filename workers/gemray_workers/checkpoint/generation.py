"""What a checkpoint says about generating with it: stop ids and default sampling (spec section 3).

Stop ids are a union over every file that names one, since checkpoints disagree: a tokenizer's end of sequence may be 1
while the model ends its turns with 106, which only generation_config.json lists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from gemray_workers.checkpoint.generation_fields import FILE, check_other_fields
from gemray_workers.checkpoint.json_file import read_json_object, refuse_broken_link
from gemray_workers.errors import CheckpointError, InvalidField
from gemray_workers.sampling import bounds

Json = Mapping[str, Any]

_MOST = 2**31 - 1
"""Largest integer, which requests and answers carry in 32 bits."""

HONOURED = (
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "min_new_tokens",
    "min_p",
    "repetition_penalty",
    "stop_strings",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
)
"""Fields of generation_config.json that requests take where theirs are unset."""


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Sampling defaults of a checkpoint; a request's own fields win over them, stop ids are added to its own."""

    stop_token_ids: tuple[int, ...]
    """Ascending union of config.json (both levels), generation_config.json and the tokenizer's end of sequence."""
    temperature: float
    """0 (greedy) when generation_config.json says ``do_sample: false``; 1 when nothing is said."""
    top_k: int
    """0 keeps all; so it is when nothing is said."""
    top_p: float
    suppress_tokens: tuple[int, ...]
    """Ids never to choose, ascending."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    """Most tokens to generate."""
    max_length: int | None = None
    """Most tokens of prompt and output; `max_new_tokens` wins over it, as in transformers."""
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str], *, vocab_size: int) -> GenerationDefaults:
        """Read a Hugging Face model directory. Only config.json must be there.

        Args:
            path: the directory.
            vocab_size: ids that the model has: no stop or suppressed id is another.

        Raises:
            CheckpointError: no config.json, a file that is no JSON object, or an end-of-sequence token that the
                tokenizer does not know.
            InvalidField: a value that no request could have, or a field that would change the tokens and is not
                computed; it reads ``generation_config.json: top_p``.
        """
        directory = Path(path)
        config = _read(directory / "config.json")
        if config is None:
            raise CheckpointError(f"{directory} has no config.json")
        text_config = config.get("text_config") or {}
        if not isinstance(text_config, Mapping):
            raise InvalidField("config.json: text_config", text_config, "an object")
        generation = _read(directory / FILE) or {}
        check_other_fields(generation, honoured=HONOURED)
        stop_ids = {
            *_ids(config, "eos_token_id", "config.json: ", vocab_size),
            *_ids(text_config, "eos_token_id", "config.json: text_config.", vocab_size),
            *_ids(generation, "eos_token_id", f"{FILE}: ", vocab_size),
            *_tokenizer_eos(directory, vocab_size),
        }
        return cls(
            stop_token_ids=tuple(sorted(stop_ids)),
            temperature=_temperature(generation),
            top_k=_top_k(generation),
            top_p=_top_p(generation),
            suppress_tokens=tuple(sorted(_ids(generation, "suppress_tokens", f"{FILE}: ", vocab_size))),
            min_p=_min_p(generation),
            repetition_penalty=_repetition_penalty(generation),
            max_new_tokens=_count(generation, "max_new_tokens", least=1),
            max_length=_count(generation, "max_length", least=2),
            min_new_tokens=_count(generation, "min_new_tokens", least=0) or 0,
            stop_strings=_stop_strings(generation),
        )


def _temperature(generation: Json) -> float:
    temperature = _number(generation, "temperature", default=1.0)
    if not bounds.is_temperature(temperature):
        raise InvalidField(f"{FILE}: temperature", temperature, bounds.TEMPERATURE_ALLOWED)
    do_sample = generation.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise InvalidField(f"{FILE}: do_sample", do_sample, "true or false")
    return 0.0 if do_sample is False else temperature


def _top_k(generation: Json) -> int:
    top_k = generation.get("top_k")
    if top_k is None:
        return 0
    if not _is_natural(top_k) or top_k > bounds.MAX_TOP_K:
        raise InvalidField(f"{FILE}: top_k", top_k, f"an integer 0..{bounds.MAX_TOP_K} (0 keeps all)")
    return int(top_k)


def _top_p(generation: Json) -> float:
    top_p = _number(generation, "top_p", default=1.0)
    if not bounds.is_top_p(top_p):
        raise InvalidField(f"{FILE}: top_p", top_p, bounds.TOP_P_ALLOWED)
    return top_p


def _min_p(generation: Json) -> float:
    min_p = _number(generation, "min_p", default=0.0)
    if not 0 <= min_p <= 1:
        raise InvalidField(f"{FILE}: min_p", min_p, "0 <= min_p <= 1")
    return min_p


def _repetition_penalty(generation: Json) -> float:
    penalty = _number(generation, "repetition_penalty", default=1.0)
    if not bounds.is_repetition_penalty(penalty):
        raise InvalidField(f"{FILE}: repetition_penalty", penalty, bounds.REPETITION_PENALTY_ALLOWED)
    return penalty


def _count(generation: Json, field: str, *, least: int) -> int | None:
    value = generation.get(field)
    if value is not None and not (_is_natural(value) and least <= value <= _MOST):
        raise InvalidField(f"{FILE}: {field}", value, f"an integer {least}..{_MOST}, or null")
    return value


def _stop_strings(generation: Json) -> tuple[str, ...]:
    value = generation.get("stop_strings")
    strings = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(text, str) and 0 < len(text) <= bounds.MAX_STOP_CHARS for text in strings) or (
        len(strings) > bounds.MAX_STOP_STRINGS
    ):
        allowed = f"at most {bounds.MAX_STOP_STRINGS} strings of 1 to {bounds.MAX_STOP_CHARS} characters"
        raise InvalidField(f"{FILE}: stop_strings", value, allowed)
    return tuple(strings)


def _number(generation: Json, field: str, *, default: float) -> float:
    value = generation.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidField(f"{FILE}: {field}", value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidField(f"{FILE}: {field}", value, "a number") from None


def _ids(content: Json, field: str, where: str, vocab_size: int) -> set[int]:
    """The ids of a field that holds one id, a list of them, or null."""
    value = content.get(field)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_id(token_id, vocab_size) for token_id in ids):
        raise InvalidField(where + field, value, f"{_id_of(vocab_size)}, a list of them, or null")
    return set(ids)


def _is_natural(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


def _is_id(value: object, vocab_size: int) -> bool:
    return _is_natural(value) and value < vocab_size


def _id_of(vocab_size: int) -> str:
    return f"a token id of the model (an integer 0..{vocab_size - 1})"


def _tokenizer_eos(directory: Path, vocab_size: int) -> set[int]:
    """The id of the tokenizer's eos_token; empty when no file names one or there is no vocabulary to look it up in."""
    tokenizer_config = _read(directory / "tokenizer_config.json") or {}
    token = tokenizer_config.get("eos_token")
    if isinstance(token, Mapping):  # an AddedToken written out with its flags
        token = token.get("content")
    if token is None:
        return set()
    if not isinstance(token, str):
        raise InvalidField("tokenizer_config.json: eos_token", token, "a token, or an object with its content")
    looked_in = []
    for source, ids in _vocabularies(directory, tokenizer_config):
        if token in ids:
            if not _is_id(ids[token], vocab_size):
                raise InvalidField(f"{source}: {token}", ids[token], _id_of(vocab_size))
            return {ids[token]}
        looked_in.append(source)
    if looked_in:
        raise CheckpointError(
            f"{directory}: tokenizer_config.json: eos_token = {token!r} is in none of {', '.join(looked_in)}"
        )
    return set()


def _vocabularies(directory: Path, tokenizer_config: Json) -> Iterator[tuple[str, dict[str, int]]]:
    """(where, ids by token) of each vocabulary that is there; the one that is tens of megabytes comes last."""
    source = "tokenizer_config.json: added_tokens_decoder"
    try:
        if decoder := tokenizer_config.get("added_tokens_decoder"):
            yield source, {entry["content"]: int(token_id) for token_id, entry in decoder.items()}
        source = "added_tokens.json"
        if (added := _read(directory / source)) is not None:
            yield source, dict(added)
        source = "tokenizer.json"
        if (tokenizer := _read(directory / source)) is not None:
            vocabulary = tokenizer["model"]["vocab"]
            if isinstance(vocabulary, list):  # Unigram: [token, score] by id
                vocabulary = {token: token_id for token_id, (token, _) in enumerate(vocabulary)}
            yield source, vocabulary | {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{directory}: {source} is not a vocabulary as transformers writes it: {error!r}"
        ) from error


def _read(file: Path) -> Json | None:
    """A JSON object, or None if there is no such file."""
    refuse_broken_link(file)
    return read_json_object(file) if file.is_file() else None
