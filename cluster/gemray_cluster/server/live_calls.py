"""The calls that a server has not answered yet: waited for while it drains, and cut with a reason when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from gemray_cluster.server.errors import CallCut


class LiveCalls:
    """Knows each call's task. A call is live until its client has been sent the last message."""

    def __init__(self) -> None:
        """No call yet."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cut: dict[asyncio.Task[Any], str] = {}
        """Why, for calls that were told to end."""
        self._none = asyncio.Event()
        self._none.set()

    @asynccontextmanager
    async def live(self) -> AsyncIterator[None]:
        """Count the current task as a call while the block runs; raises CallCut from it once `cut` is called."""
        task = _current_task()
        self._tasks.add(task)
        self._none.clear()
        try:
            with self.raising_cut():
                yield
        finally:
            self._cut.pop(task, None)
            self._tasks.discard(task)
            if not self._tasks:
                self._none.set()

    @contextmanager
    def raising_cut(self) -> Iterator[None]:
        """Raise CallCut from the block, inside `live`, where `cut` has cancelled what it waits for. A cancellation by
        the client stays one."""
        try:
            yield
        except asyncio.CancelledError:
            task = _current_task()
            reason = self._cut.get(task)
            if reason is None or task.uncancel():
                raise
            raise CallCut(reason) from None

    def cut(self, reason: str) -> int:
        """Make every live call end with `reason`; how many are told so that were not before."""
        told = self._tasks - self._cut.keys()
        for task in told:
            self._cut[task] = reason
            task.cancel()
        return len(told)

    async def wait_for_none(self) -> None:
        """Return once no call is live."""
        await self._none.wait()


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "a call has a task"
    return task
