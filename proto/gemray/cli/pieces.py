"""What a delta shows: pieces of thought, of text and of calls, and how a terminal sets them apart."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gemray.v1 import generation_pb2 as pb

DIM, PLAIN = "\x1b[2m", "\x1b[0m"

Kind = Literal["text", "thought", "call"]


@dataclass(frozen=True)
class Piece:
    """A piece of an answer, as it is printed."""

    text: str
    kind: Kind = "text"


def pieces_of(delta: pb.Delta) -> Iterator[Piece]:
    """In order: a thought before what it is about, and calls behind the text, each a line NAME(ARGUMENTS)."""
    if delta.reasoning:
        yield Piece(delta.reasoning, "thought")
    if delta.text:
        yield Piece(delta.text)
    for call in delta.tool_calls:
        begin = f"{call.name}(" if call.HasField("name") else ""
        yield Piece(begin + call.arguments_json + (")\n" if call.is_complete else ""), "call")


@dataclass
class Page:
    """Standard output, with thoughts dimmed where it is a terminal and calls on lines of their own."""

    dims: bool
    _kind: Kind = "text"
    _is_line_open: bool = False

    @classmethod
    def of_stdout(cls) -> Page:
        """Dims on terminals, unless NO_COLOR is set."""
        return cls(dims=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))

    def write(self, piece: Piece) -> None:
        """Print a piece at once."""
        if "call" in (self._kind, piece.kind) and self._kind != piece.kind and self._is_line_open:
            print()
        if self.dims and (self._kind == "thought") != (piece.kind == "thought"):
            print(DIM if piece.kind == "thought" else PLAIN, end="")
        self._kind = piece.kind
        print(piece.text, end="", flush=True)
        if piece.text:
            self._is_line_open = not piece.text.endswith("\n")

    def head(self, line: str) -> None:
        """Print a line before an answer."""
        print(line, flush=True)

    def end(self) -> None:
        """End an answer, its line and what is dimmed."""
        if self.dims and self._kind == "thought":
            print(PLAIN, end="")
        if self._kind != "call" or self._is_line_open:
            print(flush=True)
        self._kind, self._is_line_open = "text", False
