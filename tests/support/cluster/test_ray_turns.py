"""Rays begin one after the other, and none waits for one that has ended."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from support.cluster import ray_turns
from support.cluster.command import killed_at_last
from support.cluster.ray_turns import in_turn, rays_turn
from support.waiting import HANG_S

BEGINS = "import time; time.sleep(3600)"
HAS_A_WORKER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()', 'default_worker.py'])"


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray_turns, "LOCK", str(tmp_path / "lock"))


async def python(code: str) -> asyncio.subprocess.Process:
    return await in_turn(asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE))


async def its_turn() -> None:
    with await asyncio.wait_for(asyncio.to_thread(rays_turn), HANG_S):
        pass


async def test_the_next_waits_for_one_that_begins_until_it_has_ended() -> None:
    async with killed_at_last(await python(BEGINS)) as process:
        waiting = asyncio.create_task(its_turn())
        await asyncio.sleep(1)
        assert not waiting.done()
        process.kill()
        await waiting


async def test_one_that_has_workers_is_not_waited_for() -> None:
    async with killed_at_last(await python(HAS_A_WORKER)) as process:
        await its_turn()
        assert process.returncode is None


async def test_one_that_cannot_be_started_is_not_waited_for() -> None:
    with pytest.raises(FileNotFoundError):
        await in_turn(asyncio.create_subprocess_exec("/no/such/program"))
    await its_turn()
