"""Blocking calls that may never return."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def in_own_thread(call: Callable[..., T], *arguments: Any) -> T:
    """`call(*arguments)` in a thread of its own, which does not keep the process alive.

    Ray's calls wait for ever when the cluster has gone away. A thread of `asyncio.to_thread` would then hold
    `asyncio.run`, and the interpreter after it, at the very end; this one can be left behind by a timeout. Not for
    starting Ray: its processes end with the thread that started them.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: object) -> None:
        if not future.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            outcome: object = call(*arguments)
            set_outcome: Callable[[Any], None] = future.set_result
        except BaseException as error:
            outcome, set_outcome = error, future.set_exception
        with suppress(RuntimeError):  # the loop has ended, and nobody waits any more
            loop.call_soon_threadsafe(settle, set_outcome, outcome)

    threading.Thread(target=run, name=getattr(call, "__name__", "blocking call"), daemon=True).start()
    return await future
