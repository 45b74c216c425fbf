"""How a command ends: errors as one sentence and an exit code, output that cannot be written, interrupts."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from gemray.cli.account import flush_or_forget, tell
from gemray.cli.exit_codes import FAILED, INTERRUPTED, WRONG
from gemray.cli.standard_streams import open_closed_streams

WRITE_ERRORS = (errno.ENOSPC, errno.EIO, errno.EPIPE)


def run(app: Callable[[], object], exit_code_of: Callable[[Exception], int | None]) -> None:
    """Run a command. What `exit_code_of` knows becomes one sentence and that code; other errors pass through."""
    open_closed_streams()
    try:
        try:
            app()
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
        code = exit_code_of(error)
        if code is None:
            raise
        tell(f"error: {error}")
        sys.exit(code)
    finally:
        flush_or_forget()
