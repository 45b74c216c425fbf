"""Turns of callers and lanes of text work."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray_cluster.server import text_work
from gemray_cluster.server.errors import QueueFull
from gemray_cluster.server.text_work import SHORT_BYTES, TextWork, Turns
from support.waiting import HANG_S

LONG = SHORT_BYTES + 1


@settings(max_examples=100)
@given(
    arrivals=st.lists(st.sampled_from("abc"), max_size=20),
    leaving=st.sets(st.integers(0, 19)),
    places=st.integers(1, 3),
)
def test_callers_take_turns(arrivals: list[str], leaving: set[int], places: int) -> None:
    async def run() -> list[str]:
        turns, came = Turns(places), []

        async def one(caller: str) -> None:
            await turns.take(caller)
            came.append(caller)

        tasks = [asyncio.create_task(one(caller)) for caller in arrivals]
        await asyncio.sleep(0)
        for index in leaving & set(range(len(tasks))):
            tasks[index].cancel()
        await asyncio.sleep(0)
        while not all(task.done() for task in tasks):
            turns.give_back()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        for _ in tasks[:places]:
            turns.give_back()
        assert await asyncio.gather(*tasks, return_exceptions=True)
        return came

    if not arrivals:
        return
    came = asyncio.run(run())
    stayed = [caller for index, caller in enumerate(arrivals) if index not in leaving or index < places]
    assert sorted(came) == sorted(stayed), "all who stayed, once each"
    if not leaving:
        waited = came[places:]
        for index, caller in enumerate(waited[:-1]):
            others_waited = set(waited[index + 1 :]) - {caller}
            assert not (waited[index + 1] == caller and others_waited), f"{caller} twice in {waited}"


async def test_a_long_text_does_not_stand_before_a_short_one() -> None:
    work, gate = TextWork(), threading.Event()
    long = asyncio.create_task(work.run("a", LONG, gate.wait))
    try:
        assert await asyncio.wait_for(work.run("a", SHORT_BYTES, lambda: "short"), HANG_S) == "short"
        assert not long.done()
    finally:
        gate.set()
        await long
        work.close()


async def test_bytes_of_long_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_work, "MAX_LONG_BYTES_OF_CALLER", 3 * LONG)
    monkeypatch.setattr(text_work, "MAX_LONG_BYTES", 4 * LONG)
    work, gate = TextWork(), threading.Event()
    taken = [asyncio.create_task(work.run("a", LONG, gate.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="from this connection"):
        await work.run("a", LONG, gate.wait)
    taken.append(asyncio.create_task(work.run("b", LONG, gate.wait)))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await work.run("c", LONG, gate.wait)
    taken[1].cancel()
    await asyncio.sleep(0)
    taken.append(asyncio.create_task(work.run("a", LONG, gate.wait)))
    gate.set()
    await asyncio.gather(*taken, return_exceptions=True)
    assert await work.run("c", 100 * LONG, lambda: 1) == 1, "one alone may be as long as a request is"
    work.close()


async def test_an_error_gives_the_place_back() -> None:
    work = TextWork()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await work.run("a", LONG, lambda: 1 // 0)
    work.close()


async def test_the_next_place_is_another_callers() -> None:
    turns, order = Turns(1), list[str]()
    await turns.take("other")

    async def take(name: str) -> None:
        await turns.take(name[0])
        order.append(name)
        turns.give_back()

    tasks = [asyncio.create_task(take(name)) for name in ("a1", "a2", "a3", "b1", "b2")]
    await asyncio.sleep(0)
    turns.give_back()
    await asyncio.gather(*tasks)
    assert order == ["a1", "b1", "a2", "b2", "a3"]


async def test_a_place_that_comes_as_its_taker_leaves_goes_on() -> None:
    turns = Turns(1)
    await turns.take("one")
    leaver = asyncio.create_task(turns.take("two"))
    await asyncio.sleep(0)
    turns.give_back()
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    taker = asyncio.create_task(turns.take("three"))
    await asyncio.sleep(0)
    assert taker.done()
