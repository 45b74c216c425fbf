"""Calls that may never return do not keep the process from ending."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from gemray_cluster.ray_runtime.blocking import in_own_thread
from support.waiting import HANG_S

NEVER_RETURNS = """
import asyncio, threading
from gemray_cluster.ray_runtime.blocking import in_own_thread

async def main():
    try:
        async with asyncio.timeout(0.2):
            await in_own_thread(threading.Event().wait)
    except TimeoutError:
        print("left behind")

asyncio.run(main())
"""


async def test_results_and_errors_come_back() -> None:
    assert await in_own_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_own_thread(divmod, 7, 0)


async def test_calls_run_side_by_side() -> None:
    barrier = threading.Barrier(3, timeout=HANG_S)
    assert sorted(await asyncio.gather(*(in_own_thread(barrier.wait) for _ in range(3)))) == [0, 1, 2]


def test_a_call_that_never_returns_does_not_hold_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEVER_RETURNS], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert done.stdout == "left behind\n"
