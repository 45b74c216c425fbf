"""An output taken apart: thoughts, answer and tool calls, told by token ids.

Control tokens say what follows them; no text can. So the same ids have the same structure however a step, a drafter or
a client grouped them, and an answer that merely spells `<|tool_call>` makes no call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gemray_cluster.text.heading import Heading
from gemray_cluster.text.tool_calls import CallPiece, CallText

OPENS_THOUGHT, CLOSES_THOUGHT = "<|channel>", "<channel|>"
OPENS_CALL, CLOSES_CALL, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
TURNS = ("<|turn>", "<turn|>")
STRUCTURAL = frozenset({OPENS_THOUGHT, CLOSES_THOUGHT, OPENS_CALL, CLOSES_CALL, QUOTE, *TURNS})
"""Control tokens that end a run of text: no character and no stop string reaches across one, but for a quote."""
HEADER = "thought\n"
"""Name of the channel, which begins a thought and is no part of it."""


@dataclass
class Parts:
    """What was added to an output."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)

    def add_call(self, piece: CallPiece | None) -> None:
        """Join the piece to the one before it where both are of one call."""
        if piece is None:
            return
        last = self.calls[-1] if self.calls else None
        if last is None or last.index != piece.index:
            self.calls.append(piece)
        else:
            self.calls[-1] = replace(
                last, arguments=last.arguments + piece.arguments, is_complete=last.is_complete or piece.is_complete
            )


class Structure:
    """Takes one output's text and control tokens in order."""

    def __init__(self, *, open_thought: str | None = None) -> None:
        """`open_thought` is the beginning of a thought that the prompt leaves open."""
        self._parts = Parts()
        self._call: CallText | None = None
        self._thought: Heading | None = None
        self.num_calls = 0
        """Calls so far, whole or not."""
        self.num_complete_calls = 0
        if open_thought is not None:
            self._thought = Heading(HEADER)
            self._thought.write(open_thought)

    def write(self, text: str) -> None:
        """Take text."""
        if self._call is not None:
            was_complete = self._call.is_complete
            no_call, piece = self._call.write(text)
            self._note(piece, was_complete=was_complete)
            self._show(no_call)
        else:
            self._show(text)

    def control(self, token: str) -> None:
        """Take a control token by its spelling; one that structures nothing is passed over."""
        if token == QUOTE:
            if self._call is not None:
                was_complete = self._call.is_complete
                self._note(self._call.quote(), was_complete=was_complete)
            return
        if token in STRUCTURAL:
            self._end_call(is_closed=token == CLOSES_CALL)
            if self._thought is not None:
                self._parts.reasoning += self._thought.end()[1]  # no heading reaches across
        if token == OPENS_CALL:
            self._call = CallText(self.num_calls)
        elif token == OPENS_THOUGHT and self._thought is None:
            self._thought = Heading(HEADER)
        elif token == CLOSES_THOUGHT or token in TURNS:
            self._thought = None

    def finish(self) -> None:
        """The output has ended: let out what was held back."""
        self._end_call(is_closed=False)
        self._thought = None  # what may become its heading is the beginning of one

    def take(self) -> Parts:
        """What was added since the last time."""
        parts, self._parts = self._parts, Parts()
        return parts

    def _note(self, piece: CallPiece | None, *, was_complete: bool) -> None:
        if piece is None:
            return
        self.num_calls = max(self.num_calls, piece.index + 1)
        self.num_complete_calls += piece.is_complete and not was_complete
        self._parts.add_call(piece)

    def _show(self, text: str) -> None:
        """Add text that is part of no call."""
        if self._thought is None:
            self._parts.text += text
        else:
            self._parts.reasoning += self._thought.write(text)[1]

    def _end_call(self, *, is_closed: bool) -> None:
        if self._call is None:
            return
        call, self._call = self._call, None
        if not is_closed:
            call.cut()
            return
        no_call, piece = call.end()
        self._note(piece, was_complete=False)
        self._show(no_call)


def open_thought_of(prompt_ids: Sequence[int], control_ids: Mapping[str, int]) -> int | None:
    """Where the text of a thought begins that a prompt leaves open; None if it leaves none."""
    marks = {control_ids[token] for token in (OPENS_THOUGHT, CLOSES_THOUGHT, *TURNS) if token in control_ids}
    for at in range(len(prompt_ids) - 1, -1, -1):
        if prompt_ids[at] in marks:
            return at + 1 if prompt_ids[at] == control_ids.get(OPENS_THOUGHT) else None
    return None
