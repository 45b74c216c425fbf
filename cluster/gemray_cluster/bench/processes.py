"""Plain processes, one a rank, that stay up from setup to setup. When a setup fails they are ended and started anew."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from gemray_cluster.bench.report import Part
from gemray_cluster.bench.settings import Setup
from gemray_workers.errors import GemrayError
from gemray_workers.rank.waiting_threads import waiting_threads

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

    from gemray_cluster.bench.probes import Probes

PRELOADED = [
    "gemray_cluster.bench.offline",
    # What reading a checkpoint's config imports.
    "transformers.models.auto.modeling_auto",
    "transformers.models.gemma4.configuration_gemma4",
]
"""What the server imports that ranks on CPUs are forked from, which takes a rank seconds."""
GRACE_S = 5.0
"""How long the other ranks may take once one has failed: they may have more to say."""


class SetupFailed(GemrayError):
    """A rank raised, died, or the setup took too long."""


class TimeIsUp(GemrayError):
    """The run's time limit ended a setup; its processes are gone."""


class RankProcesses:
    """A context manager; processes start at first need."""

    def __init__(self, profiles: Path | None) -> None:
        """`profiles`: where rank 0 writes what setups with `profile` give."""
        self._profiles = profiles
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> RankProcesses:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End every process."""
        self._end()

    def run(self, setup: Setup, until: float = math.inf) -> Iterator[Part]:
        """Measure one setup; its parts as they come.

        Args:
            setup: what to measure.
            until: when the whole run's time is up, in seconds of `time.monotonic`.

        Raises:
            SetupFailed: a rank raised, died, or took longer than the setup may.
            TimeIsUp: the setup was not done at `until`.
        """
        if time.monotonic() >= until:
            raise TimeIsUp("the time limit has been reached")
        self._start(setup.gang_size, setup.device)
        rendezvous = f"tcp://127.0.0.1:{_free_port()}"
        gang = self._connections[: setup.gang_size]
        for connection in gang:
            connection.send((setup, rendezvous))
        try:
            yield from _collect(gang, time.monotonic() + setup.deadline_s, until)
        except (SetupFailed, TimeIsUp):
            self._end()
            raise

    def _start(self, num_ranks: int, device: str) -> None:
        os.environ.update(waiting_threads(os.environ))  # read as torch is imported
        context: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
        if device == "cpu":  # CUDA refuses a process whose parent has used it, and what is imported is not ours alone
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
        for rank in range(len(self._processes), num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, theirs, self._profiles), name=f"bench-rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def _end(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._connections.clear()
        self._processes.clear()


def _collect(gang: list[Connection], deadline: float, until: float) -> Iterator[Part]:
    """Parts until every rank is done."""
    open_ranks = dict(enumerate(gang))
    troubles: dict[int, str] = {}
    while open_ranks:
        ready = wait(list(open_ranks.values()), max(0.0, min(deadline, until) - time.monotonic()))
        if not ready and not troubles and until < deadline:
            raise TimeIsUp("the time limit has been reached")
        if not ready:
            troubles |= dict.fromkeys(open_ranks, "gave no answer in time")
            break
        for rank in [rank for rank, connection in open_ranks.items() if connection in ready]:
            try:
                kind, content = open_ranks[rank].recv()
            except (EOFError, ConnectionResetError):
                kind, content = "failed", "its process died"
            if kind == "part":
                yield content
                continue
            del open_ranks[rank]
            if kind == "failed":
                troubles[rank] = content
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if troubles:
        raise SetupFailed("\n".join(f"rank {rank}: {reason}" for rank, reason in sorted(troubles.items())))


def _serve(rank: int, connection: Connection, profiles: Path | None) -> None:
    """A rank's life: setups until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    import torch

    from gemray_cluster.bench.probes import Probes

    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    probes = Probes()
    while True:
        try:
            setup, rendezvous = connection.recv()
        except EOFError:
            return
        _answer(setup, rank, rendezvous, connection, profiles, probes)


def _answer(
    setup: Setup, rank: int, rendezvous: str, connection: Connection, profiles: Path | None, probes: Probes
) -> None:
    from gemray_cluster.bench.offline import OfflineRank

    with contextlib.suppress(BrokenPipeError):
        try:
            engine = OfflineRank(setup, rank, rendezvous, probes)
            for part in engine.parts(profiles):
                connection.send(("part", part))
            engine.close()
            del engine
        except GemrayError as error:
            connection.send(("failed", f"{type(error).__name__}: {error}"))
        except Exception:
            connection.send(("failed", traceback.format_exc(limit=-6)))
        else:
            connection.send(("done", None))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
