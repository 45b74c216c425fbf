"""Help texts as terminals show them."""

from __future__ import annotations

import inspect
from collections.abc import Callable


def with_whole_paragraphs(command: Callable[..., object]) -> str:
    """A command's docstring with each paragraph as one line: typer would break lines where the source does."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
