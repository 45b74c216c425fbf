"""Commands as they stand in deployment files and documents."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

DEPLOY_DOC = Path(__file__).resolve().parents[3] / "docs" / "deploy.md"

_BLOCK = re.compile(r"(?:<!-- (?P<key>run by|needs): (?P<value>.+?) -->\n)?```sh\n(?P<body>.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of shell commands in a document."""

    key: str | None
    """``run by`` a test, or ``needs`` what CI has not; None when the document does not say."""
    value: str | None
    commands: tuple[str, ...]


def blocks_of(document: Path = DEPLOY_DOC) -> list[Block]:
    """The shell blocks, in order."""
    return [
        Block(found["key"], found["value"], tuple(line for line in found["body"].splitlines() if line))
        for found in _BLOCK.finditer(document.read_text())
    ]


def commands_run_by(test_file: str) -> tuple[str, ...]:
    """The commands that the document says are run by `test_file`; it must run these and no others."""
    return tuple(command for block in blocks_of() if block.value == test_file for command in block.commands)


def serve_flags_in(command: str) -> dict[str, str | None]:
    """The flags of the `gemray serve` in a shell command, by setting name; of one that is given twice ``A,B``."""
    words = shlex.split(re.split(r"[<>&|;]", command.split("gemray serve", 1)[1])[0])
    flags: dict[str, str | None] = {}
    while words:
        name, equals, value = words.pop(0).partition("=")
        assert name.startswith("--"), f"{name} is no flag"
        setting, value = name[2:].replace("-", "_"), value if equals else words.pop(0)
        flags[setting] = f"{flags[setting]},{value}" if setting in flags else value
    return flags
