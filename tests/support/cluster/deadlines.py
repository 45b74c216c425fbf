"""Deadlines of clients that pass while the gang has the request, however slow the machine is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from support.cluster.fake_gang import FakeGang

FIRST_S = 0.25


async def until_taken(gang: FakeGang, ask: Callable[[float], Awaitable[None]]) -> None:
    """Ask with a deadline of so many seconds, twice as many each time, until one passed when the gang had the request.

    Args:
        gang: gives no whole answer within the deadlines.
        ask: one call with that deadline, which passes.
    """
    deadline_s, before = FIRST_S, len(gang.submitted)
    while len(gang.submitted) == before:
        await ask(deadline_s)
        deadline_s *= 2
