"""A rank's process: where it runs, what it runs with, and the store at which the ranks meet."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from gemray_workers.config import EngineConfig
from gemray_workers.parallel.network_interface import choose_interface

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessLocation:
    """The node that a rank's process runs on, and its card."""

    node_id: str
    node_ip: str
    gpu: int | None
    """Ordinal of the rank's card in this process; None on CPU."""

    def device(self) -> torch.device:
        """The rank's card, or the CPU."""
        return torch.device("cpu") if self.gpu is None else torch.device("cuda", self.gpu)

    def bind_device(self) -> None:
        """Make the rank's card the current one of this thread: CUDA's current device belongs to a thread."""
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)


LocateProcess = Callable[[EngineConfig], ProcessLocation]
"""Asks the launcher's runtime, inside the process. Raises CapacityError when the rank has no card of its own."""


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank's process runs and with what."""

    node_id: str
    """The same for ranks that share a node."""
    node_ip: str
    host: str
    pid: int
    cores: int
    """CPU cores that the process may use."""
    versions: dict[str, str]
    """Versions of what ranks must have in common, by distribution name."""


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is told before it loads."""

    rendezvous: str
    """``tcp://host:port`` on rank 0's node."""
    interface_ip: str
    """The address whose network interface carries this rank's collectives."""
    threads: int
    """Threads of one operation on CPU tensors."""
    ranks_here: int = 1
    """Ranks of the gang on this rank's node, itself included."""


def process_facts(location: ProcessLocation) -> RankFacts:
    """The facts of this process."""
    return RankFacts(
        node_id=location.node_id,
        node_ip=location.node_ip,
        host=socket.gethostname(),
        pid=os.getpid(),
        cores=len(os.sched_getaffinity(0)),
        versions={name: version(name) for name in ("gemray", "torch")},
    )


def set_up_process(rank: int, size: int, setup: RankSetup) -> None:
    """Set the process's threads and, when `size` ranks have collectives, the interface that carries them."""
    torch.set_num_threads(setup.threads)
    reason = "none is needed by one rank"
    if size > 1:
        reason = choose_interface(setup.interface_ip, os.environ)
    logger.info("rank %d: %d threads, network interface: %s", rank, setup.threads, reason)


def open_store(host: str, timeout_s: float) -> tuple[TCPStore, str]:
    """Serve a store at a free port of `host`; it and its ``tcp://host:port``. It serves as long as it is held.

    The port is bound before it is named, so no other process can take it, and on `host` alone: torch's own store
    would listen on every interface, unauthenticated.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=128) as listening:
        port = listening.getsockname()[1]
        store = TCPStore(
            host,
            port,
            is_master=True,
            multi_tenant=True,  # a later TCPStore of this process at this port is this one
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            timeout=timedelta(seconds=timeout_s),
        )
    return store, f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
