"""Work that recurses in compiled code: on a thread whose stack is large enough for any input of its size."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK_BYTES = 256 << 20
"""Address space, of which only what is used becomes memory. llguidance takes up to 9 KiB for each reference that it
follows, and the largest grammar has room for 10,000 of them."""

Result = TypeVar("Result")
_SIZE_LOCK = threading.Lock()


def on_deep_stack(work: Callable[[], Result]) -> Result:
    """The result of `work`, or what it raises. Other threads that begin meanwhile may get as large a stack."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # it is raised again where the result is asked for
            future.set_exception(error)

    thread = threading.Thread(target=run, name="gemray-deep-stack", daemon=True)
    with _SIZE_LOCK:
        size = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(size)
    return future.result()
