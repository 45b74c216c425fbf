"""Blocking calls that may never return."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def in_own_thread(call: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """`call(*arguments, **keywords)` in a thread of its own, which does not keep the process alive.

    Ray's calls never return when the cluster has gone away. A thread of `asyncio.to_thread` would then hold
    `asyncio.run`, and the interpreter after it, at the very end; this one can be left behind by a timeout. Not for
    starting Ray: its processes end with the thread that started them.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # who stops waiting does not stop the call

    def run() -> None:
        try:
            result = call(*arguments, **keywords)
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name=getattr(call, "__name__", "blocking call"), daemon=True).start()
    return await asyncio.wrap_future(outcome)
