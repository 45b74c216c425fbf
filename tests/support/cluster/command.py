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
    """A command with its start."""
    return subprocess.run([*GEMRAY, *arguments], capture_output=True, text=True, timeout=HANG_S, check=False)


async def run(
    *arguments: str, stdin: str | None = None, environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit code, output and errors of a command, without the time that it imports."""
    command = await ForkedCommand.start(
        *arguments, environment=environment, stdin=None if stdin is None else stdin.encode()
    )
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
