"""Threads that render and tokenize: long texts never stand before short ones, nor one caller before the others.

A text of megabytes takes seconds and hundreds of megabytes to cut into tokens. So long texts go one at a time, on a
thread of their own, and wait within a bound of bytes; short ones have the other threads. Callers take turns in both.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gemray_cluster.server.errors import QueueFull

SHORT_BYTES = 16 << 10
"""About 20 ms of work."""
MAX_LONG_BYTES = 128 << 20
"""Most bytes of long texts that wait or are worked on, all callers together."""
MAX_LONG_BYTES_OF_CALLER = 32 << 20
"""Most of them for one caller: a connection."""
MAX_SHORT_THREADS = 8

Result = TypeVar("Result")


class Turns:
    """A number of places that callers take in turn: each in its own order, none twice while another waits."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, caller: str) -> None:
        """Wait for a place."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()  # the place came just as its taker left
            raise

    def give_back(self) -> None:
        """Hand the place to whoever is next."""
        while self._waiting:
            caller, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[caller] = turns  # behind the others
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1


class TextWork:
    """Runs work on texts in threads."""

    def __init__(self) -> None:
        num_short = min(MAX_SHORT_THREADS, max(1, (os.cpu_count() or 1) // 2))
        self._short_pool = ThreadPoolExecutor(num_short, "gemray-short-text")
        self._grammar_pool = ThreadPoolExecutor(1, "gemray-grammar")
        self._long_pool = ThreadPoolExecutor(1, "gemray-long-text")
        self._short, self._long, self._grammars = Turns(num_short), Turns(1), Turns(1)
        self._long_bytes: dict[str, int] = {}

    async def run(self, caller: str, num_bytes: int, work: Callable[[], Result]) -> Result:
        """The result of `work`, which costs about as much as `num_bytes` of text.

        Raises QueueFull when too many bytes of long texts wait. Work that has begun ends also when its caller has left.
        """
        if num_bytes <= SHORT_BYTES:
            return await self._in_turn(self._short, self._short_pool, caller, work, lambda: None)
        of_caller, of_all = self._long_bytes.get(caller, 0), sum(self._long_bytes.values())
        if of_all and (of_caller + num_bytes > MAX_LONG_BYTES_OF_CALLER or of_all + num_bytes > MAX_LONG_BYTES):
            raise QueueFull(
                f"the server holds {of_all} bytes of long texts to tokenize, {of_caller} of them from this connection; "
                f"its limits are {MAX_LONG_BYTES} and {MAX_LONG_BYTES_OF_CALLER}: try again later"
            )
        self._long_bytes[caller] = of_caller + num_bytes
        return await self._in_turn(
            self._long, self._long_pool, caller, work, lambda: self._forget_bytes(caller, num_bytes)
        )

    async def compile(self, caller: str, work: Callable[[], Result]) -> Result:
        """The result of compiling a grammar, which takes up to a second: beside all texts, one after the other."""
        return await self._in_turn(self._grammars, self._grammar_pool, caller, work, lambda: None)

    async def _in_turn(
        self,
        turns: Turns,
        pool: ThreadPoolExecutor,
        caller: str,
        work: Callable[[], Result],
        when_over: Callable[[], None],
    ) -> Result:
        try:
            await turns.take(caller)
        except BaseException:
            when_over()
            raise

        def over(_: asyncio.Future[Result]) -> None:
            turns.give_back()
            when_over()

        running = asyncio.get_running_loop().run_in_executor(pool, work)
        running.add_done_callback(over)
        return await asyncio.shield(running)  # a thread cannot be ended: its place is taken until it is done

    def _forget_bytes(self, caller: str, num_bytes: int) -> None:
        left = self._long_bytes[caller] - num_bytes
        if left:
            self._long_bytes[caller] = left
        else:
            del self._long_bytes[caller]

    def close(self) -> None:
        """Let the threads end; what waits for one is dropped."""
        self._short_pool.shutdown(wait=False, cancel_futures=True)
        self._long_pool.shutdown(wait=False, cancel_futures=True)
        self._grammar_pool.shutdown(wait=False, cancel_futures=True)
