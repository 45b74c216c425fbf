"""Times in which the server's own process did nothing: it or its machine was stopped, or it had no CPU."""

from __future__ import annotations

import asyncio
import logging
import time

logger = logging.getLogger(__name__)

TICK_S = 1.0
TOLD_S = 5.0
"""Shorter ones are a busy machine's."""


async def tell_standstills() -> None:
    """Log each that lasted `TOLD_S`, for ever. All else that a log tells of it are clients' and ranks' broken waits."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(TICK_S)
        stood_s = time.monotonic() - began - TICK_S
        if stood_s > TOLD_S:
            logger.warning(
                "this server's process did nothing for %.1f s: it was stopped, or had no CPU; ranks went on, streams "
                "and health checks waited",
                stood_s,
            )
