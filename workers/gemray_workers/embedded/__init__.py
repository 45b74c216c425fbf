"""The embedded Gemma 4 family: a small trained target with both kinds of drafter, shipped as data.

`embedded_path("gemray-tiny")` is a Hugging Face model directory; README.md beside this file is the model card.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path
from typing import Final, Literal, get_args

EmbeddedName = Literal[
    "gemray-tiny",
    "gemray-tiny-assistant",
    "gemray-tiny-assistant-centroid",
    "gemray-tiny-dflash",
]
EMBEDDED_NAMES: Final[tuple[EmbeddedName, ...]] = get_args(EmbeddedName)


class UnknownEmbeddedModel(KeyError):
    """The name is none of the models shipped with gemray."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"no embedded model {self.name!r}; there are {', '.join(EMBEDDED_NAMES)}"


def is_embedded(name: str) -> bool:
    """Whether `embedded_path` knows this name."""
    return name in EMBEDDED_NAMES


def embedded_path(name: str) -> Path:
    """The directory of an embedded model."""
    if not is_embedded(name):
        raise UnknownEmbeddedModel(name)
    return _root() / name


def checksums() -> dict[str, str]:
    """Relative path -> SHA-256 of every shipped model file, as SHA256SUMS lists them."""
    lines = (_root() / "SHA256SUMS").read_text("utf-8").splitlines()
    return {path: digest for digest, path in (line.split("  ", 1) for line in lines)}


def damaged_files() -> list[str]:
    """The shipped files that are missing or whose content is not the published one; empty when all is well."""
    root = _root()
    return [path for path, digest in checksums().items() if _digest(root / path) != digest]


def _root() -> Path:
    # A wheel is always unpacked when installed, so the resource is a real directory.
    return Path(str(resources.files(__name__)))


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
