"""Commands as they stand in deployment files and documents."""

from __future__ import annotations

import re
import shlex


def serve_flags_in(command: str) -> dict[str, str | None]:
    """The flags of the `gemray serve` in a shell command, by setting name."""
    words = shlex.split(re.split(r"[<>&|;]", command.split("gemray serve", 1)[1])[0])
    flags: dict[str, str | None] = {}
    while words:
        name, equals, value = words.pop(0).partition("=")
        assert name.startswith("--"), f"{name} is no flag"
        flags[name[2:].replace("-", "_")] = value if equals else words.pop(0)
    return flags
