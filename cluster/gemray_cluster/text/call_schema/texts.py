"""Expressions of whole texts as the grammar's library sees them: whether they hold together, and of one text."""

from __future__ import annotations

from gemray_cluster.text.call_schema.pattern import in_slashes, literal_pattern
from gemray_cluster.text.call_schema.shape import Counts
from gemray_workers.grammar.probe import NO_TEXT, why_no_text


class Texts:
    """Remembers what it has tried."""

    def __init__(self) -> None:
        """Nothing is tried yet."""
        self._tried: dict[str, str | None] = {}

    def fault_of(self, terminal: str) -> str | None:
        """Why a terminal can't be compiled; None for one that can, be it of no text."""
        reason = self._why_none(f"start: PART\nPART: {terminal}\n")
        return None if reason == NO_TEXT else reason

    def fault_of_numbers(self, rule: str) -> str | None:
        """Why there are none of these numbers."""
        return self._why_none(f"start: part\npart: {rule}\n")

    def has_some(self, terminal: str) -> bool:
        """Whether a terminal has any text."""
        return self._why_none(f"start: PART\nPART: {terminal}\n") is None

    def matches(self, expression: str, text: str) -> bool:
        """Whether a text is one of an expression's."""
        return self.has_some(f"{in_slashes(expression)} & {in_slashes(literal_pattern(text))}")

    def _why_none(self, lark: str) -> str | None:
        if lark not in self._tried:
            self._tried[lark] = why_no_text(lark)
        return self._tried[lark]


def terminal_of(expressions: tuple[str, ...], length: Counts) -> str:
    """A terminal of all texts of which each of these holds."""
    parts = [in_slashes(expression) for expression in expressions]
    if not length.says_nothing or not parts:
        most = "" if length.most is None else length.most
        parts.append(in_slashes(f"(?s:.{{{length.least},{most}}})"))
    return " & ".join(parts)
