"""A Ray cluster here whose GCS keeps its tables, in a Redis or on disk, and can be killed and started again."""

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
from ray._private.node import Node

from support.chaos.serve_over_ray import free_port
from support.cluster.ray_patience import RAY_PATIENCE
from support.cluster.ray_turns import rays_turn

RAY = str(Path(sys.executable).with_name("ray"))


KEEPS_TABLES_ON_DISK = hasattr(Node, "_is_rocksdb_gcs")
"""Whether this version of Ray can; else it takes a Redis."""


class TolerantCluster:
    """Use `start`."""

    def __init__(self) -> None:
        self._port = free_port()
        self._temporary = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # short: sockets lie in it
        self._redis: subprocess.Popen[bytes] | None = None
        self._gcs_command: list[str] = []
        self._gcs_environment: dict[str, str] = {}

    @classmethod
    async def start(cls, redis_server: str | None, num_cpus: int) -> TolerantCluster:
        """Start a head with so many CPUs over a Redis of its own (a program), or with None over files."""
        cluster = cls()
        try:
            await cluster._start_head(cluster._keep_tables(redis_server), num_cpus)
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
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _keep_tables(self, redis_server: str | None) -> dict[str, str]:
        """Make what keeps the tables ready; the variables by which Ray knows it."""
        if redis_server is None:
            tables = self._temporary / "tables"
            tables.mkdir()
            return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tables)}
        port = free_port()
        self._redis = subprocess.Popen(
            [redis_server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
        )
        return {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}"}

    async def _start_head(self, environment: Mapping[str, str], num_cpus: int) -> None:
        flags: Mapping[str, object] = {
            "port": self._port,
            "node-ip-address": "127.0.0.1",
            "num-cpus": num_cpus,
            "num-gpus": 0,
            "include-dashboard": "false",
            "object-store-memory": 100_000_000,
            "temp-dir": self._temporary,
        }
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        with await asyncio.to_thread(rays_turn):
            head = await asyncio.create_subprocess_exec(
                RAY, "start", "--head", "--disable-usage-stats", *arguments,
                env={**os.environ, **RAY_PATIENCE, **environment},
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
