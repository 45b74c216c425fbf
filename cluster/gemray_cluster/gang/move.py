"""A request that waits in one gang and is told to wait in another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from gemray_cluster.gang.client import GangClient
from gemray_workers.messages import SequenceDelta

G = TypeVar("G", bound=GangClient)


class Move(Generic[G]):
    """One request's way from gang to gang: it may go as long as the gang that it is in has given it nothing.

    Nothing is lost by it but the part of a prompt that was computed.
    """

    def __init__(self) -> None:
        """Nothing has been asked of a gang yet."""
        self._told: asyncio.Future[G] | None = None
        self._target: G | None = None

    @property
    def is_possible(self) -> bool:
        """Whether the request waits, and has not been told to go."""
        return self._told is not None and not self._told.done()

    def go_to(self, gang: G) -> None:
        """Let it wait in `gang`; only where `is_possible`."""
        assert self._told is not None
        self._told.set_result(gang)

    def take_target(self) -> G | None:
        """The gang to go to, once; None where the request has not been told to go."""
        target, self._target = self._target, None
        return target

    async def until_told(self, deltas: AsyncGenerator[SequenceDelta, None]) -> AsyncGenerator[SequenceDelta, None]:
        """Yield `deltas`; none where the request is told to go before the first, which leaves `deltas` to be closed."""
        told = self._told = asyncio.get_running_loop().create_future()
        first = asyncio.ensure_future(anext(deltas, None))
        first.add_done_callback(lambda done: done.cancelled() or done.exception())  # its error may come too late
        try:
            await asyncio.wait((first, told), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._told = None
            if not first.done():
                first.cancel()
                await asyncio.wait([first])
        if told.done():
            self._target = told.result()
            return
        delta = first.result()
        if delta is None:
            return
        yield delta
        async for delta in deltas:
            yield delta
