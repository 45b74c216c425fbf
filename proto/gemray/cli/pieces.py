"""What a delta shows: pieces of thought and of text, and how a terminal sets them apart."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from gemray.v1 import generation_pb2 as pb

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def pieces_of(delta: pb.Delta) -> Iterator[tuple[str, bool]]:
    """(text, whether it is thought), in order: a thought comes before what it is about."""
    if delta.reasoning:
        yield delta.reasoning, True
    if delta.text:
        yield delta.text, False


@dataclass
class Page:
    """Standard output, with thoughts dimmed where it is a terminal."""

    dims: bool
    _is_dim: bool = False

    @classmethod
    def of_stdout(cls) -> Page:
        """Dims on terminals, unless NO_COLOR is set."""
        return cls(dims=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))

    def write(self, text: str, *, is_thought: bool = False) -> None:
        """Print a piece at once."""
        if self.dims and is_thought != self._is_dim:
            self._is_dim = is_thought
            print(DIM if is_thought else PLAIN, end="")
        print(text, end="", flush=True)

    def end(self) -> None:
        """End the line, and what is dimmed."""
        self.write("\n")
