"""What stands at the beginning of a thought or a call and is not shown: a channel's name, or `call:`."""

from __future__ import annotations


class Heading:
    """Tells a heading from the text behind it; what may still become one is held back."""

    def __init__(self, spelling: str, *, begun: str = "") -> None:
        """`begun` has been written already, and is told no more."""
        is_open = spelling.startswith(begun) and begun != spelling
        self._spelling = spelling
        self._num_begun = len(begun)
        self._held: str | None = begun if is_open else None
        """None once it is told."""

    def write(self, text: str) -> tuple[str, str]:
        """Take text; returns (the heading, once it is whole, what is behind it or is none)."""
        if self._held is None:
            return "", text
        self._held += text
        if self._spelling.startswith(self._held) and self._held != self._spelling:
            return "", ""
        return self._told(len(self._spelling) if self._held.startswith(self._spelling) else 0)

    def end(self) -> tuple[str, str]:
        """What is held, as no more text comes; a heading's words alone are a heading."""
        if self._held is None:
            return "", ""
        return self._told(len(self._held) if self._held == self._spelling.strip() else 0)

    def _told(self, length: int) -> tuple[str, str]:
        held, self._held = (self._held or "")[self._num_begun :], None
        length = max(0, length - self._num_begun)
        return held[:length], held[length:]
