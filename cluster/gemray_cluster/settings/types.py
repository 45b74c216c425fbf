"""Kinds of setting: how the text of a flag, a variable or a file becomes a value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Generic, TypeVar

from gemray_workers.checkpoint.hub import SIMILAR, NotInCache, find_in_cache, is_hub_name
from gemray_workers.embedded import EMBEDDED_NAMES, embedded_path, is_embedded

T = TypeVar("T")

_PREFIXES = "kmgtp"
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}{b}": 10 ** (3 * power) for power, prefix in enumerate(_PREFIXES, 1) for b in ("", "b")}
_UNITS |= {f"{prefix}i{b}": 1 << (10 * power) for power, prefix in enumerate(_PREFIXES, 1) for b in ("", "b")}


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What a setting holds."""

    parse: Callable[[str], T]
    """Raises ValueError for a text that is not allowed."""
    allowed: str
    """In words, for errors."""
    metavar: str
    """For --help."""
    repeats: bool = False
    """Whether its flag may be given several times; the texts are then joined by commas."""


def _text(value: str) -> str:
    if not value:
        raise ValueError("empty")
    return value


def _seconds(value: str) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError("not a duration")
    return number


def parse_size(value: str) -> int:
    """Bytes of a text such as ``2GiB``, ``512 MiB``, ``1.5GB`` or ``1048576``; raises ValueError.

    The B may be left out, as Kubernetes does: ``40Gi`` is 40GiB, and ``24G`` is 24GB, powers of ten.
    """
    match = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)", value.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("not a size")
    return int(Decimal(match[1]) * _UNITS[match[2]])


AUTO = "auto"


def _switch(value: str) -> bool:
    states = {"true": True, "false": False}
    if value.lower() not in states:
        raise ValueError("neither on nor off")
    return states[value.lower()]


def _number(value: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not a number")
    return number


def _integer_or_auto(value: str) -> int | str:
    return AUTO if value == AUTO else int(value)


def _size_or_auto(value: str) -> int | str:
    return AUTO if value == AUTO else parse_size(value)


def one_of(*names: str) -> Kind[str]:
    """One of a few names."""

    def parse(value: str) -> str:
        if value not in names:
            raise ValueError("unknown name")
        return value

    return Kind(parse, "one of " + ", ".join(names), "|".join(names))


_HUB_URL = re.compile(r"(?:https?://huggingface\.co|hf:/)/(?P<name>[^/]+/[^/?#@]+)")


class NotAllowed(ValueError):
    """A text that is not allowed; the message is what would be."""


def model_directory(text: str, base: Path = Path()) -> str:
    """The directory of a model: a path from `base`, unchanged, or what an embedded model or the hub's cache has.

    Raises NotAllowed for ORG/NAME that is neither a path nor in the cache.
    """
    path = str(base / text)
    if Path(path).exists():
        return path
    if is_embedded(text):
        return str(embedded_path(text))
    if (url := _HUB_URL.match(text)) is not None:
        raise NotAllowed(f"a directory, or ORG/NAME of a model in the Hugging Face cache; did you mean {url['name']}?")
    near = get_close_matches(text.lower(), EMBEDDED_NAMES, n=1, cutoff=SIMILAR)
    if near and "/" not in text:
        raise NotAllowed(f"{MODEL.allowed}; did you mean {near[0]}?")
    if not is_hub_name(text):
        return path
    try:
        return find_in_cache(text)
    except NotInCache as error:
        raise NotAllowed(str(error)) from error


def _model(value: str) -> str:
    """An absolute path: ranks of a cluster that was joined run in another directory than this process."""
    return str(Path(model_directory(_text(value))).absolute())


def _models(value: str) -> tuple[str, ...]:
    """One or two models, with a comma between them; a path that exists is one, whatever commas it has."""
    texts = [value] if Path(value).exists() else value.split(",")
    if len(texts) > MOST_DRAFTERS:
        raise ValueError("too many")
    return tuple(_model(text) for text in texts)


MOST_DRAFTERS = 2
TEXT = Kind(_text, "a text that is not empty", "TEXT")
PATH = Kind(_text, "a path", "PATH")
MODEL = Kind(_model, "a path, ORG/NAME, or one of " + ", ".join(EMBEDDED_NAMES), "PATH|NAME")
MODELS = Kind(_models, MODEL.allowed + ", or two of them with a comma between", MODEL.metavar, repeats=True)
SWITCH = Kind(_switch, "true or false", "")
INTEGER = Kind(int, "an integer", "INTEGER")
INTEGER_OR_AUTO = Kind(_integer_or_auto, "an integer, or auto", "INTEGER|auto")
NUMBER = Kind(_number, "a finite number", "NUMBER")
SECONDS = Kind(_seconds, "seconds, a finite number >= 0", "SECONDS")
_SIZES = "a size such as 2GiB, 40Gi, 24G (24 * 10^9) or 1048576"
SIZE = Kind(parse_size, _SIZES, "SIZE")
SIZE_OR_AUTO = Kind(_size_or_auto, f"{_SIZES}, or auto", "SIZE|auto")
