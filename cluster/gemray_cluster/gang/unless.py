"""Waiting for something that a failure elsewhere makes pointless."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from gemray_cluster.gang.client import GangUnavailable

T = TypeVar("T")


async def unless(lost: Coroutine[Any, Any, str], wanted: Coroutine[Any, Any, T]) -> T:
    """The result of `wanted`. Raises GangUnavailable with what `lost` returns if that comes first."""
    losing, wanting = asyncio.create_task(lost), asyncio.create_task(wanted)
    try:
        await asyncio.wait((losing, wanting), return_when=asyncio.FIRST_COMPLETED)
        if not wanting.done():
            raise GangUnavailable(losing.result())
        return wanting.result()
    finally:
        for task in (losing, wanting):
            task.cancel()
        await asyncio.wait((losing, wanting))
