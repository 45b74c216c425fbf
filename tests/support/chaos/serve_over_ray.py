"""`gemray serve` over a Ray of its own as a process: two replicas of two ranks of the embedded family."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil

from support.chaos.family import DRAFT_TOKENS, DRAFTER
from support.chaos.server_process import START_S
from support.cluster.serve_process import GEMRAY
from support.waiting import eventually

REPLICAS, RANKS = 2, 2


class ServeOverRay:
    """Use `start`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.log = log
        self.address = ""

    @classmethod
    async def start(cls, log: Path, *, port: int, heartbeat_s: float) -> ServeOverRay:
        """Start it with an account in `log`, which begins anew, and return when it is ready."""
        flags = {
            "model": "gemray-tiny",
            "drafter": DRAFTER,
            "draft-tokens": DRAFT_TOKENS,
            "dtype": "float64",
            "device": "cpu",
            "tp": RANKS,
            "replicas": REPLICAS,
            "kv-memory": "256MiB",
            "max-num-seqs": 32,
            "max-rebuilds": 100,
            "heartbeat-deadline-s": heartbeat_s,
            "local-num-cpus": REPLICAS * RANKS,
            "local-num-gpus": 0,
            "port": port,
        }
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(*GEMRAY, "serve", *arguments, stderr=stderr)
        server = cls(process, log)
        try:
            await eventually(lambda: server.count("ready: serving") > 0 or process.returncode is not None, START_S)
            (line,) = [line for line in log.read_text().splitlines() if "ready: serving" in line]
        except BaseException:
            await server.kill()
            raise
        server.address = line.split()[-1]
        return server

    def count(self, text: str) -> int:
        """How often it has said so."""
        return self.log.read_text(errors="replace").count(text)

    @property
    def num_serving_again(self) -> int:
        """Gangs that have served in place of another."""
        return self.count("serves again after")

    def descendants(self) -> list[psutil.Process]:
        """Ray's processes and the ranks."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def ranks(self) -> list[psutil.Process]:
        """The ranks' processes."""
        return [process for process in self.descendants() if "RankWorker" in _command(process)]

    def of_ray(self, name: str) -> psutil.Process:
        """Ray's ``raylet`` or ``gcs_server``."""
        (found,) = [p for p in self.descendants() if Path(_command(p).split(" ")[0]).name == name]
        return found

    async def kill(self) -> None:
        """SIGKILL. Nothing if it has ended."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
