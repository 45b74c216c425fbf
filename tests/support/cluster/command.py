"""The `gemray` command, run as a user runs it."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from support.waiting import HANG_S

GEMRAY = [sys.executable, "-c", "from gemray_cluster.cli import main; main()"]


def gemray(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GEMRAY, *arguments], capture_output=True, text=True, timeout=HANG_S, check=False)


async def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*GEMRAY, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), HANG_S)
    return process.returncode or 0, out.decode(), err.decode()
