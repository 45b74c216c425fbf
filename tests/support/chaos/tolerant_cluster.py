"""A Ray cluster on this machine whose GCS keeps its tables in a Redis, and can be killed and started again."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from support.chaos.serve_over_ray import free_port

RAY = str(Path(sys.executable).with_name("ray"))


class RedisCluster:
    """Use `start`."""

    def __init__(self, redis: subprocess.Popen[bytes], redis_port: int) -> None:
        self._redis = redis
        self._redis_port = redis_port
        self._port = free_port()
        self._temporary = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # short: sockets lie in it
        self._gcs_command: list[str] = []
        self._gcs_environment: dict[str, str] = {}

    @classmethod
    async def start(cls, redis_server: str, num_cpus: int) -> RedisCluster:
        """Start a Redis (the program `redis_server`) and a head with so many CPUs over it."""
        port = free_port()
        redis = subprocess.Popen(
            [redis_server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
        )
        cluster = cls(redis, port)
        try:
            await cluster._start_head(num_cpus)
        except BaseException:
            cluster.end()
            raise
        return cluster

    @property
    def address(self) -> str:
        """HOST:PORT of the GCS."""
        return f"127.0.0.1:{self._port}"

    def processes(self) -> list[psutil.Process]:
        """Ray's processes and the ranks."""
        own = [process for process in psutil.process_iter() if str(self._temporary) in " ".join(_command(process))]
        return [*own, *(child for process in own for child in _children(process) if child not in own)]

    def gcs(self) -> psutil.Process:
        """The GCS of the moment."""
        (found,) = [
            process
            for process in self.processes()
            if Path(_command(process)[0]).name == "gcs_server" and process.status() != psutil.STATUS_ZOMBIE
        ]
        return found

    def kill_gcs(self) -> None:
        """SIGKILL. It is the one that `start_gcs` starts again."""
        gcs = self.gcs()
        self._gcs_command, self._gcs_environment = gcs.cmdline(), gcs.environ()
        gcs.kill()

    def start_gcs(self) -> None:
        """Start the killed GCS again, with what it was started with."""
        with (self._temporary / "gcs_again.log").open("ab") as log:
            subprocess.Popen(
                self._gcs_command, env=self._gcs_environment, stdout=log, stderr=log, start_new_session=True
            )

    def end(self) -> None:
        """End everything, and take the files away."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._redis.kill()
        self._redis.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)

    async def _start_head(self, num_cpus: int) -> None:
        flags: Mapping[str, object] = {
            "port": self._port,
            "node-ip-address": "127.0.0.1",
            "num-cpus": num_cpus,
            "num-gpus": 0,
            "include-dashboard": "false",
            "object-store-memory": 100_000_000,
            "temp-dir": self._temporary,
        }
        head = await asyncio.create_subprocess_exec(
            RAY, "start", "--head", "--disable-usage-stats", *(f"--{name}={value}" for name, value in flags.items()),
            env={**os.environ, "RAY_REDIS_ADDRESS": f"127.0.0.1:{self._redis_port}"},
            stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert await head.wait() == 0, "the head does not start"


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() or [""]
    except psutil.Error:
        return [""]


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
