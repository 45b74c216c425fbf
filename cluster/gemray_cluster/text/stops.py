"""Stop strings over streamed text: nothing that could still become one is let out."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a text before the first of several stop strings.

    The text comes in pieces, one a token. The match that is complete first wins; of two that are complete at the same
    character, the longer. A match that is complete before `min_tokens` tokens is passed over, like a stop id.
    """

    def __init__(self, stops: Sequence[str], *, min_tokens: int = 0) -> None:
        """`stops` are not empty strings."""
        self._stops = tuple(dict.fromkeys(stops))
        self._min_tokens = min_tokens
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        """Text that was not let out: the longest end of it all that begins a stop string."""
        self._num_tokens = 0
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str) -> str:
        """Add one token's text; returns what may be shown. Once `matched` is set the text has ended."""
        self._num_tokens += 1
        text = self._held + piece
        if self._num_tokens >= self._min_tokens:
            match = self._first_match(text, new_from=len(self._held))
            if match is not None:
                start, self.matched = match
                self._held = ""
                return text[:start]
        keep = self._possible_prefix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back, when the sequence ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, *, new_from: int) -> tuple[int, str] | None:
        """Start and string of the match that ends first, among those that end behind `new_from`."""
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(0, new_from - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _possible_prefix(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string without being all of it."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
