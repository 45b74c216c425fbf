"""The family's server as a process: started, killed, asked which processes it has."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from support.chaos.census import Census, take_census

TESTS = Path(__file__).resolve().parents[2]
START_S = 600.0
"""Only a hang takes that long."""


class FamilyServer:
    """Use `start`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address = ""
        self.replicas: dict[int, list[int]] = {}
        """Processes by rank of the replicas that serve, by their index."""
        self._has_ended = False
        self._changed = asyncio.Condition()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, log: Path, *arguments: str) -> FamilyServer:
        """Start it, and return when all replicas serve. What it logs is appended to `log`."""
        path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "support.chaos.family_server", *arguments,
                stdout=asyncio.subprocess.PIPE, stderr=stderr, env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        server = cls(process)
        try:
            await server.until(lambda: bool(server.replicas))
        except BaseException:
            await server.kill()
            raise
        return server

    @property
    def pid(self) -> int:
        return self.process.pid

    async def until(self, condition: Callable[[], bool], deadline_s: float = START_S) -> None:
        """Wait for what `replicas` will show."""
        async with asyncio.timeout(deadline_s), self._changed:
            await self._changed.wait_for(lambda: condition() or self._has_ended)
        assert condition(), f"the server has ended: {self.process.returncode}"

    async def kill(self) -> None:
        """SIGKILL. Nothing if it has ended."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._listening

    async def census(self) -> Census:
        """What the server and all its ranks hold."""
        ranks = [pid for pids in self.replicas.values() for pid in pids]
        return await take_census(self.address, psutil.Process(self.pid), ranks)

    def descendants(self) -> list[psutil.Process]:
        """The processes that it has started, ranks among them."""
        return psutil.Process(self.pid).children(recursive=True)

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            told = json.loads(line)
            async with self._changed:
                self.address = told["address"]
                self.replicas = {int(index): pids for index, pids in told["replicas"].items()}
                self._changed.notify_all()
        async with self._changed:
            self._has_ended = True
            self._changed.notify_all()
