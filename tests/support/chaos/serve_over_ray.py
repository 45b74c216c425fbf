"""`gemray serve` over a Ray of its own as a process: two replicas of two ranks of the embedded family."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import psutil

from support.chaos.census import Census, take_census
from support.chaos.census_of_ray import gcs_address_of, num_placement_groups
from support.chaos.family import DRAFT_TOKENS, DRAFTER
from support.chaos.server_process import START_S
from support.cluster.forked_command import ForkedCommand
from support.cluster.ray_patience import RAY_PATIENCE
from support.cluster.ray_turns import in_turn
from support.waiting import eventually

REPLICAS, RANKS = 2, 2


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Cluster(Protocol):
    """A Ray that was started by somebody else."""

    @property
    def address(self) -> str:
        """HOST:PORT of its GCS."""
        ...

    def processes(self) -> list[psutil.Process]:
        """Its processes, ranks included."""
        ...


class ServeOverRay:
    """Use `start`."""

    def __init__(self, process: ForkedCommand, log: Path, cluster: Cluster | None) -> None:
        self.process = process
        self.log = log
        self._cluster = cluster
        self.address = ""

    @classmethod
    async def start(
        cls,
        log: Path,
        *,
        port: int,
        heartbeat_s: float,
        cluster: Cluster | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> ServeOverRay:
        """Start it with an account in `log`, which begins anew, and return when it is ready.

        On `cluster`, or on a Ray of its own; `environment` is put before that of this process.
        """
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
            "max-step-tokens": 256,  # no step is long, even one full of replays where the machine is slow
            "prefill-chunk": 64,
            "max-rebuilds": 100,
            "heartbeat-deadline-s": heartbeat_s,
            "port": port,
        }
        own_ray = {"local-num-cpus": REPLICAS * RANKS, "local-num-gpus": 0}
        flags |= own_ray if cluster is None else {"address": cluster.address}
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        log.write_bytes(b"")
        start = ForkedCommand.start(
            "serve", *arguments, environment={**os.environ, **RAY_PATIENCE, **environment}, log=log
        )
        process = await (in_turn(start) if cluster is None else start)
        server = cls(process, log, cluster)
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
        own = psutil.Process(self.process.pid).children(recursive=True)
        return own if self._cluster is None else [*own, *self._cluster.processes()]

    def ranks(self) -> list[psutil.Process]:
        """The ranks' processes."""
        return [process for process in self.descendants() if "RankWorker" in _command(process)]

    def of_ray(self, name: str) -> psutil.Process:
        """Ray's ``raylet`` or ``gcs_server``."""
        (found,) = [p for p in self.descendants() if Path(_command(p).split(" ")[0]).name == name]
        return found

    async def census(self) -> Census:
        """What the server and all its ranks hold, and what its Ray has placed."""
        groups = num_placement_groups(gcs_address_of(self.of_ray("raylet")))
        ranks = [rank.pid for rank in self.ranks()]
        return await take_census(self.address, psutil.Process(self.process.pid), ranks, placement_groups=groups)

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
