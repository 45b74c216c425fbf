"""Where tables are printed: as wide as a terminal, or as wide as they need."""

from __future__ import annotations

from rich.console import Console

PIPED_WIDTH = 1000
"""Columns of what no terminal shows: a row is a line, for programs that search it. Tables are as wide as they need."""


def console() -> Console:
    """The standard output."""
    made = Console()
    if not made.is_terminal:
        made.width = max(made.width, PIPED_WIDTH)
    return made
