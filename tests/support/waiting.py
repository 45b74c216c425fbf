"""Waiting for what comes true by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

HANG_S = 600.0
"""A bound that only a hang meets, on two cores that do other work as well. The suite's own timeout is longer."""


async def eventually(condition: Callable[[], bool], deadline_s: float = HANG_S) -> None:
    """Return once `condition` holds; fail at the deadline."""
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, "did not come true in time"
        await asyncio.sleep(0.01)
