"""`gemray serve` as a process of its own, with Ray and few CPUs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
from psutil import Process

from support.cluster.command import CommandProcess, killed_at_last
from support.cluster.forked_command import ForkedCommand
from support.cluster.ray_turns import in_turn
from support.waiting import HANG_S

START_S = HANG_S
PATIENCE = [f"--{name}={HANG_S:g}" for name in ("heartbeat-deadline-s", "collective-timeout-s", "drain-deadline-s")]
"""Flags of a server on a slow and shared machine."""


@asynccontextmanager
async def starting(model: Path, *more: str, port: int = 0, cpus: int = 2) -> AsyncIterator[ForkedCommand]:
    """A server process with so many CPUs for its ranks, in a session of its own, as from a terminal."""
    flags = ["--model", str(model), *PATIENCE, "--kv-memory", "32MiB", *more, "--port", str(port)]
    flags += ["--device", "cpu", "--local-num-cpus", str(cpus), "--local-num-gpus", "0"]
    process = await in_turn(ForkedCommand.start("serve", *flags, start_new_session=True))
    async with killed_at_last(process):
        yield process


@asynccontextmanager
async def served(model: Path, *more: str, tp: int = 2) -> AsyncIterator[tuple[ForkedCommand, grpc.aio.Channel]]:
    """A server that is ready, and a channel to it."""
    async with starting(model, "--tp", str(tp), *more, cpus=tp) as process:
        line = await asyncio.wait_for(line_with(process, "ready: serving"), START_S)
        async with grpc.aio.insecure_channel(line.split()[-1]) as channel:
            yield process, channel


async def line_with(process: CommandProcess, text: str) -> str:
    """The first line of the server's account that has it."""
    assert process.stderr is not None
    lines = []
    async for line in process.stderr:
        lines.append(line.decode())
        if text in lines[-1]:
            return lines[-1]
    raise AssertionError(f"the server ended without saying {text!r}:\n" + "".join(lines))


def ranks_of(process: CommandProcess) -> list[Process]:
    """The ranks' processes, workers of the server's own Ray."""
    return [p for p in Process(process.pid).children(recursive=True) if "RankWorker" in " ".join(p.cmdline())]


def ray_of(process: CommandProcess, name: str) -> Process:
    """A process of the server's own Ray: ``raylet`` or ``gcs_server``."""
    (found,) = [p for p in Process(process.pid).children() if Path(p.cmdline()[0]).name == name]
    return found


def processes_of(pid: int) -> list[Process]:
    """A process and all its descendants."""
    return [Process(pid), *Process(pid).children(recursive=True)]


def is_gone(process: Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE or not process.is_running()
    except psutil.NoSuchProcess:
        return True


def gone(processes: list[Process]) -> bool:
    return all(map(is_gone, processes))
