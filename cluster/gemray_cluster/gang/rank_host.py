"""One rank's process, whoever launched it: where it runs, its device and threads, and the `GangWorker` in it."""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import Protocol

import torch
from torch._C._distributed_c10d import TCPStore

from gemray_cluster.gang.launcher import RankFacts, RankSetup
from gemray_workers.channel import ChannelAddress
from gemray_workers.config import EngineConfig
from gemray_workers.errors import InvalidField
from gemray_workers.messages import ModelInfo, RankInfo
from gemray_workers.parallel.network_interface import choose_interface

logger = logging.getLogger(__name__)

GANG_WORKER = "gemray_workers.rank.worker:GangWorker"
"""Import path of the class that does a rank's work; tests put another one in its place."""


@dataclass(frozen=True)
class ProcessLocation:
    """The node that a rank's process runs on, and its card."""

    node_id: str
    node_ip: str
    gpu: int | None
    """Ordinal of the rank's card in this process; None on CPU."""


LocateProcess = Callable[[EngineConfig], ProcessLocation]
"""Asks the launcher's runtime, inside the process. Raises CapacityError when the rank has no card of its own."""


class RankWorker(Protocol):
    """A rank's work, as `gemray_workers.rank.worker.GangWorker` does it."""

    def load(self) -> tuple[ModelInfo, RankInfo]:
        """Join the gang and load."""
        ...

    def run(self, address: ChannelAddress | None) -> None:
        """Step until told to stop."""
        ...

    def close(self) -> None:
        """Leave the gang."""
        ...


class RankHost:
    """The far end of a `Rank`: prepares the process (device, threads, network) and runs the worker in it.

    `load` and `run` bind the device themselves: CUDA's current device belongs to a thread.
    """

    def __init__(self, config: EngineConfig, rank: int, worker_class: str, locate: LocateProcess) -> None:
        """Do nothing heavy yet.

        Args:
            config: the gang's settings.
            rank: this process's rank.
            worker_class: ``module:class`` of the worker, usually `GANG_WORKER`.
            locate: where this process runs.
        """
        self._config = config
        self._rank = rank
        self._worker_class = worker_class
        self._location = locate(config)
        self._store: TCPStore | None = None
        self._worker: RankWorker | None = None

    def facts(self) -> RankFacts:
        """Where this process runs and with what."""
        return RankFacts(
            node_id=self._location.node_id,
            node_ip=self._location.node_ip,
            host=socket.gethostname(),
            pid=os.getpid(),
            cores=len(os.sched_getaffinity(0)),
            versions={name: version(name) for name in ("gemray", "torch")},
        )

    def open_rendezvous(self, host: str) -> str:
        """Serve a store at a free port of `host` and keep it: `GangWorker` meets its peers there.

        The port is bound before it is named, so no other process can take it, and on `host` alone: torch's own
        store would listen on every interface, unauthenticated.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=128) as listening:
            port = listening.getsockname()[1]
            self._store = TCPStore(
                host,
                port,
                is_master=True,
                multi_tenant=True,  # a later TCPStore of this process at this port is this one
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
                timeout=timedelta(seconds=self._config.collective_timeout_s),
            )
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def load(self, setup: RankSetup) -> tuple[ModelInfo, RankInfo]:
        """Join the gang and load this rank's shard."""
        self._bind_device()
        torch.set_num_threads(setup.threads)
        _, reason = choose_interface(setup.interface_ip, os.environ)
        logger.info("rank %d: %d threads, network interface %s", self._rank, setup.threads, reason)
        self._worker = _worker_class(self._worker_class)(self._config, self._rank, setup.rendezvous)
        return self._worker.load()

    def run(self, address: ChannelAddress | None) -> None:
        """Step until told to stop."""
        if self._worker is None:
            raise RuntimeError("run() before load()")
        self._bind_device()
        self._worker.run(address)

    def close(self) -> None:
        """Leave the gang."""
        if self._worker is not None:
            self._worker.close()
        self._store = None

    def _bind_device(self) -> None:
        if self._location.gpu is not None:
            torch.cuda.set_device(self._location.gpu)


def _worker_class(path: str) -> Callable[[EngineConfig, int, str], RankWorker]:
    module, _, name = path.partition(":")
    if not name:
        raise InvalidField("worker_class", path, "module:class")
    found: Callable[[EngineConfig, int, str], RankWorker] = getattr(importlib.import_module(module), name)
    return found
