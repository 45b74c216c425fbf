"""Stop strings over streamed text: nothing that could still become one is let out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence


class StopMatcher:
    """Cuts a text before the first of several stop strings.

    The text comes in pieces, one a token. The match that is complete first wins; of two that are complete at the same
    character, the longer. A match that is complete before `min_tokens` tokens is passed over, like a stop id.
    A control token shows nothing, but a stop string may spell one: such strings are looked for in the text with control
    tokens written out, the others in what is shown.
    """

    def __init__(
        self,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        spells_control: Callable[[str], bool] = lambda stop: False,
        show_match: bool = False,
    ) -> None:
        """`stops` are not empty strings; `spells_control` says which of them hold a control token. With `show_match`
        the text is cut behind the stop string."""
        self._show_match = show_match
        patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._written_out = [pattern for pattern in patterns if spells_control(pattern.stop)]
        self._of_shown = [pattern for pattern in patterns if pattern not in self._written_out]
        self._patterns = patterns
        self._min_tokens = min_tokens
        self._held = ""
        """Text that was not let out: the longest end of it all that begins a stop string."""
        longest = max((len(pattern.stop) for pattern in self._written_out), default=0)
        self._is_shown: deque[bool] = deque(maxlen=longest)
        """Whether each of the newest characters is shown, control tokens written out."""
        self._num_tokens = 0
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str, control: str = "", *, ends_run: bool = False, hidden: str = "") -> str:
        """Add one token's text, or the spelling of a control token; returns what may be shown.

        `hidden` stands before the text and is let out with it; only strings that spell control tokens are found there.
        A control token that ends a run of text lies between two texts that are shown apart: no string without control
        tokens reaches across it. Once `matched` is set the text has ended.
        """
        self._num_tokens += 1
        if not self._patterns:
            return hidden + piece
        text = self._held
        for at, char in enumerate(hidden + piece):
            text += char
            self._is_shown.append(True)
            patterns = self._written_out if at < len(hidden) else self._patterns
            if (shown := self._ended(text, [p for p in patterns if p.advance(char)])) is not None:
                return shown
        for char in control if self._written_out else "":
            self._is_shown.append(False)
            if (shown := self._ended(text, [p for p in self._written_out if p.advance(char)])) is not None:
                return shown
        if ends_run:
            for pattern in self._of_shown:
                pattern.forget()
        keep = max(
            max((pattern.partial for pattern in self._of_shown), default=0),
            max((self._num_shown(pattern.partial) for pattern in self._written_out), default=0),
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back, when the sequence ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _ended(self, text: str, complete: list[_Pattern]) -> str | None:
        """What is shown up to the longest of the matches, if there is one and it counts."""
        if not complete or self._num_tokens < self._min_tokens:
            return None
        pattern = max(complete, key=lambda p: len(p.stop))
        self.matched, self._held = pattern.stop, ""
        if self._show_match:
            return text
        length = len(pattern.stop)
        return text[: len(text) - (self._num_shown(length) if pattern in self._written_out else length)]

    def _num_shown(self, newest: int) -> int:
        """How many of the newest characters are shown."""
        return sum(list(self._is_shown)[len(self._is_shown) - newest :]) if newest else 0


class _Pattern:
    """One stop string, matched character by character (Knuth, Morris, Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._matched = 0
        self._shorter = [0] * (len(stop) + 1)
        """For each number of matched characters the next smaller one that their end allows."""
        for length in range(2, len(stop) + 1):
            self._shorter[length] = self._next(self._shorter[length - 1], stop[length - 1])

    @property
    def partial(self) -> int:
        """Length of the longest end of the text that begins the string without being all of it."""
        return self._matched if self._matched < len(self.stop) else self._shorter[self._matched]

    def advance(self, char: str) -> bool:
        """Take one character; whether it completes the string."""
        matched = self._matched if self._matched < len(self.stop) else self._shorter[self._matched]
        self._matched = self._next(matched, char)
        return self._matched == len(self.stop)

    def forget(self) -> None:
        """Begin again: what comes is not behind what came."""
        self._matched = 0

    def _next(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._shorter[matched]
        return matched + (self.stop[matched] == char)
