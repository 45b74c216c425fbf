"""Waiting for what comes true by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

HANG_S = 600.0
"""A bound that only a hang meets, on two cores that do other work as well. The suite's own timeout is longer."""


_SHORTEST_S, _LONGEST_S = 0.01, 0.3
"""Between two looks. Some read a log or ask for all processes: what takes half a minute is not looked at 3,000 times
then."""
_SHARE = 0.03
"""Part of the time waited so far by which the next look may come late."""


async def eventually(condition: Callable[[], bool], deadline_s: float = HANG_S) -> None:
    """Return once `condition` holds; fail at the deadline."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < deadline_s, "did not come true in time"
        await asyncio.sleep(min(max(_SHORTEST_S, _SHARE * waited), _LONGEST_S))
