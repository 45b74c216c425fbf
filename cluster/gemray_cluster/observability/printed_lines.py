"""What libraries print, as log records: no line of plain text stands between those of a log that is JSON."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from typing_extensions import override

logger = logging.getLogger("stdout")


class PrintedLines(io.TextIOBase):
    """A stream that logs what each `print` writes as one record, of several lines where it has them."""

    def __init__(self) -> None:
        """Nothing printed yet."""
        super().__init__()
        self._begun = threading.local()
        """What each thread has written of a text that has not ended."""

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, text: str) -> int:
        whole = getattr(self._begun, "text", "") + text
        ends = text.endswith("\n")
        self._begun.text = "" if ends else whole
        if ends and whole.strip():
            logger.warning("%s", whole.rstrip())
        return len(text)


@contextmanager
def printed_lines_as_records() -> Iterator[None]:
    """Log what is printed to standard output in the block. Ray prints there when its processes die."""
    with redirect_stdout(PrintedLines()):
        yield


@contextmanager
def answers_alone() -> Iterator[TextIO]:
    """Standard output, for what a command answers; what is printed meanwhile goes to standard error."""
    answers = sys.stdout
    with redirect_stdout(sys.stderr):
        yield answers
