"""A server that stood still says so, once it goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from gemray_cluster.ray_runtime.session import RaySession
from gemray_cluster.serving import standstill
from gemray_cluster.serving.app import serving
from gemray_cluster.settings.settings import ServeSettings
from support.checkpoints.servable_checkpoint import write_servable_checkpoint
from support.waiting import eventually


class RayIsNext(Exception):
    """The server listens by now."""


async def test_a_standstill_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def opened(config: object, *, num_ranks: int) -> Any:
        monkeypatch.setattr(standstill, "TOLD_S", 0.5)
        await asyncio.sleep(0.05)
        time.sleep(0.8)  # stands for a process that is stopped
        await asyncio.sleep(0.05)
        raise RayIsNext

    monkeypatch.setattr(standstill, "TICK_S", 0.01)
    monkeypatch.setattr(standstill, "TOLD_S", 1e9)  # whatever a busy machine does to what comes before
    monkeypatch.setattr(RaySession, "open", opened)
    settings = ServeSettings(model=str(write_servable_checkpoint(tmp_path)), device="cpu", kv_memory=64 << 20, port=0)
    with caplog.at_level(logging.WARNING), pytest.raises(RayIsNext):
        async with serving(settings):
            pass
    assert "this server's process did nothing for " in caplog.text
    await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()})  # nobody watches a server that has ended
