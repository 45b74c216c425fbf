"""One tool call as the model writes it between its two tokens: `call:NAME{ARGUMENTS}`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gemray_cluster.text.call_arguments import CallArguments

MAX_NAME_CHARS = 256
NAME = re.compile(r"[\w./:-]{1,256}")
"""Names of functions: letters, digits and _ . / : -"""
PREFIX = "call:"
_MOST_HELD = len(PREFIX) + MAX_NAME_CHARS + 64
"""Characters without a brace after which what is written is no call."""


@dataclass(frozen=True)
class CallPiece:
    """What was added to one of an output's calls."""

    index: int
    """From 0 on, in the order of the output."""
    name: str | None = None
    """With the call's first piece."""
    arguments: str = ""
    """JSON; the pieces of a call concatenate to an object."""
    is_complete: bool = False
    """With the call's last piece, unless the output ended inside the call."""


class CallText:
    """The text of one call.

    What turns out to be something else than a call is given back as text, so that nothing of an answer is lost; but
    the notation of a call, whole or cut, is never text: what begins one and ends before its arguments is dropped.
    """

    def __init__(self, index: int) -> None:
        """`index` is the call's number, if it becomes one."""
        self._index = index
        self._held = ""
        self._arguments: CallArguments | None = None
        self._is_text = False
        self._is_dropped = False
        """Whether it is the notation of a call whose name is none."""

    @property
    def is_complete(self) -> bool:
        """Whether it is a call, and all of it is there."""
        return self._arguments is not None and self._arguments.is_complete

    def write(self, text: str) -> tuple[str, CallPiece | None]:
        """Take text; returns (what of it is no call, what it adds to the call)."""
        if self._is_text or self._is_dropped:
            return "" if self._is_dropped else text, None
        if self._arguments is not None:
            return "", self._added(self._arguments.write(text))
        head, brace, rest = (self._held + text).partition("{")
        if not brace and len(head) <= _MOST_HELD:
            self._held = head
            return "", None
        name = _name_of(head)
        if not brace or name is None:
            self._is_dropped = head.lstrip().startswith(PREFIX)
            self._is_text, self._held = not self._is_dropped, ""
            return "" if self._is_dropped else head + brace + rest, None
        self._arguments, self._held = CallArguments(), ""
        return "", CallPiece(self._index, name, "{" + self._arguments.write(rest), self.is_complete)

    def quote(self) -> CallPiece | None:
        """Take a quote token; one before the arguments says nothing."""
        return None if self._arguments is None else self._added(self._arguments.quote())

    def end(self) -> tuple[str, CallPiece | None]:
        """Take the token that ends a call: `call:NAME` without arguments is one, too."""
        held, self._held = self._held, ""
        if not held.lstrip().startswith(PREFIX):
            return held, None
        name = _name_of(held)
        if name is None:
            return "", None
        self._arguments = CallArguments()
        return "", CallPiece(self._index, name, "{" + self._arguments.write("}"), is_complete=True)

    def cut(self) -> None:
        """The output ends inside the call, or goes on without ending it: a name that is not whole says nothing."""
        self._held = ""

    def _added(self, arguments: str) -> CallPiece | None:
        return CallPiece(self._index, None, arguments, self.is_complete) if arguments else None


def _name_of(head: str) -> str | None:
    name = head.strip().removeprefix(PREFIX).strip()
    return name if NAME.fullmatch(name) else None
