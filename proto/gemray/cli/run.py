"""How a command ends: errors as one sentence and an exit code, output that cannot be written, interrupts."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from gemray.cli.account import flush_or_forget, tell
from gemray.cli.exit_codes import FAILED, INTERRUPTED, WRONG
from gemray.cli.standard_streams import open_closed_streams

WRITE_ERRORS = (errno.ENOSPC, errno.EIO, errno.EPIPE)


@dataclass(frozen=True)
class Commands:
    """The commands of a program, and how their errors end it."""

    app: Callable[[], object]
    exit_code_of: Callable[[Exception], int | None]
    """The code of an error that is told in one sentence; None for others, which pass through."""


def run(load: Callable[[], Commands]) -> None:
    """Run one of the commands that `load` imports: to import them takes a while, in which they may be interrupted."""
    open_closed_streams()
    commands = _loaded(load)
    try:
        try:
            commands.app()
        finally:
            sys.stdout.flush()  # here, where it can be told, rather than at the interpreter's end
    except UnicodeEncodeError as error:
        tell(f"error: the text is not valid UTF-8 ({error.reason})")
        sys.exit(WRONG)
    except OSError as error:
        if error.errno not in WRITE_ERRORS:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        if error.errno != errno.EPIPE:
            tell(f"error: the output cannot be written: {error.strerror}")
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        code = commands.exit_code_of(error)
        if code is None:
            raise
        tell(f"error: {error}")
        sys.exit(code)
    finally:
        flush_or_forget()


def _loaded(load: Callable[[], Commands]) -> Commands:
    try:
        return load()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
