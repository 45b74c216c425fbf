"""What a gang needs of whoever starts its processes: Ray in a cluster, multiprocessing in tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from gemray_workers.channel import ChannelAddress
from gemray_workers.errors import GemrayError
from gemray_workers.messages import ModelInfo, RankInfo


class RankDied(GemrayError):
    """A rank's process ended without a word: killed, crashed, or lost with its node."""


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


@dataclass(frozen=True)
class StartProgress:
    """How far a start has come, for a progress bar."""

    stage: str
    """``ray``, ``placement``, ``processes``, ``load`` or ``ready``."""
    done: int
    total: int
    detail: str = ""


ProgressListener = Callable[[StartProgress], None]


class Rank(Protocol):
    """One rank's process. Every call may raise `RankDied`, or what the process raised."""

    async def facts(self) -> RankFacts:
        """Where the process runs; returns once it is up."""
        ...

    async def open_rendezvous(self, host: str) -> str:
        """Serve the ranks' meeting point at a free port of `host`; its ``tcp://host:port``. Rank 0 alone."""
        ...

    async def load(self, setup: RankSetup) -> tuple[ModelInfo, RankInfo]:
        """Join the gang and load this rank's shard; all ranks at the same time."""
        ...

    async def run(self, address: ChannelAddress | None) -> None:
        """Step until told to stop; rank 0 is given the coordinator's address."""
        ...

    async def close(self) -> None:
        """Leave the gang in order, after `run`."""
        ...

    async def kill(self) -> None:
        """End the process at once. Idempotent."""
        ...


class Launcher(Protocol):
    """Starts the processes of one gang and gives back what they held."""

    async def launch(self, num_ranks: int, progress: ProgressListener) -> list[Rank]:
        """Find room and start a process per rank, in rank order. Raises CapacityError when there is no room."""
        ...

    async def here(self) -> tuple[str, str]:
        """(node id, node ip) of the coordinator, in the terms of `RankFacts`."""
        ...

    async def lost(self) -> str:
        """Return when what the processes run on has died, with the cause; the processes are of no use then."""
        ...

    async def release(self) -> None:
        """Give the room back; the processes are dead by now. Idempotent."""
        ...
