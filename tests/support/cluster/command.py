"""The `gemray` command, run as a user runs it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

from support.cluster.forked_command import ForkedCommand
from support.waiting import HANG_S

GEMRAY = [sys.executable, "-c", "from gemray_cluster.cli import main; main()"]

CommandProcess = asyncio.subprocess.Process | ForkedCommand
P = TypeVar("P", bound=CommandProcess)


def gemray(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GEMRAY, *arguments], capture_output=True, text=True, timeout=HANG_S, check=False)


async def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*GEMRAY, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), HANG_S)
    return process.returncode or 0, out.decode(), err.decode()


async def run_forked(*arguments: str, environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """As `run`, without the seconds that a command imports which serves or checks."""
    command = await ForkedCommand.start(*arguments, environment=environment)
    async with killed_at_last(command):
        out, err = await asyncio.wait_for(command.communicate(), HANG_S)
        return await command.wait(), out.decode(), err.decode()


@asynccontextmanager
async def killed_at_last(process: P) -> AsyncIterator[P]:
    """The process, which is killed where it still runs at the end."""
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def end_in_order(process: CommandProcess) -> None:
    """Tell it to end, and wait until it has, with status 0."""
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), HANG_S) == 0
