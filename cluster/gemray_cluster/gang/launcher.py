"""What a gang needs to start its processes and to call them: Ray in a cluster, multiprocessing in tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from gemray_workers.errors import GemrayError
from gemray_workers.rank.worker import RankWorker

P = ParamSpec("P")
T = TypeVar("T")


class RankDied(GemrayError):
    """A rank's process ended without a word: killed, crashed, or lost with its node."""


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
    """One rank's process, in which the launcher has made a `RankWorker`."""

    async def call(self, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `method` of the process's worker returns; the first call waits until the process is up.

        Raises what the method raised, or `RankDied` when the process is gone.
        """
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
        """Return, with the cause, when what the processes run on (a Ray cluster) has died; they cannot be used any
        more."""
        ...

    async def release(self) -> None:
        """Give the room back; the processes are dead by now. Idempotent."""
        ...
