"""A request goes to another gang before its first delta, and never after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from gemray_cluster.gang.client import GangUnavailable
from gemray_cluster.gang.replay import Move
from gemray_workers.messages import SequenceDelta
from support.cluster.fake_gang import FakeGang
from support.waiting import eventually


class Deltas:
    """Two deltas of a gang, the first when it is let go."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_begin = asyncio.Event()
        self.left = False
        self._error = error

    async def run(self) -> AsyncGenerator[SequenceDelta, None]:
        try:
            await self.may_begin.wait()
            if self._error is not None:
                raise self._error
            for token in (1, 2):
                yield SequenceDelta(request_id="r", token_ids=[token])
        finally:
            self.left = True


async def read(move: Move[FakeGang], deltas: Deltas) -> list[int]:
    async with aclosing(deltas.run()) as running, aclosing(move.until_told(running)) as given:
        return [token for delta in [delta async for delta in given] for token in delta.token_ids]


@pytest.mark.parametrize("error", [None, GangUnavailable("it died")])
@pytest.mark.parametrize("comes_too_late", [False, True])
async def test_one_that_waits_goes(error: Exception | None, comes_too_late: bool) -> None:
    move, deltas, target = Move[FakeGang](), Deltas(error), FakeGang()
    assert not move.is_possible
    reading = asyncio.create_task(read(move, deltas))
    await eventually(lambda: move.is_possible)
    if comes_too_late:
        deltas.may_begin.set()
    move.go_to(target)
    assert not move.is_possible
    assert await reading == []
    assert deltas.left
    assert (move.take_target(), move.take_target()) == (target, None)


async def test_one_that_has_begun_stays() -> None:
    move, deltas = Move[FakeGang](), Deltas()
    deltas.may_begin.set()
    async with aclosing(deltas.run()) as running, aclosing(move.until_told(running)) as given:
        first = await anext(given)
        assert not move.is_possible
        assert [*first.token_ids, *(await anext(given)).token_ids] == [1, 2]
        assert await anext(given, None) is None
    assert move.take_target() is None


async def test_errors_and_clients_that_leave_pass_through() -> None:
    move, deltas = Move[FakeGang](), Deltas(GangUnavailable("it died"))
    deltas.may_begin.set()
    with pytest.raises(GangUnavailable):
        await read(move, deltas)
    move, deltas = Move[FakeGang](), Deltas()
    reading = asyncio.create_task(read(move, deltas))
    await eventually(lambda: move.is_possible)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert deltas.left
    assert not move.is_possible
