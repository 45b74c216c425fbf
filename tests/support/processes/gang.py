"""Run a function on N gloo ranks: pools of forked processes that stay up for the whole test session.

A test hands over a picklable top-level function ``fn(comm, *args)`` and gets every rank's result. Ranks import the
test's module from its file, so functions and classes of a test module may be sent.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from gemray_workers.parallel.communicator import SoloCommunicator
from support.processes.forking import forking
from support.processes.hung_ranks import FLIGHT_RECORDS, of_flight_record
from support.waiting import HANG_S

GRACE_S = 10.0
"""How long the other ranks may take to end by themselves once one has failed."""

RunOnGang = Callable[..., list[Any]]
"""Type of the `run_on_gang` fixture: `GangPools.run`."""


class GangFailure(AssertionError):
    """A rank raised, died or passed the deadline; the message holds each rank's remote traceback."""


class GangPools:
    """One pool of ranks a size, started at first use."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}

    def run(self, size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = HANG_S) -> list[Any]:
        """Call ``fn(comm, *args)`` on `size` ranks; the results in rank order. Size 1 runs in this process.

        Raises GangFailure. A gang that failed is not used again: the next call starts fresh processes.
        """
        if size == 1:
            try:
                return [fn(SoloCommunicator(), *args)]
            except Exception as error:
                raise GangFailure(f"rank 0 of 1 raised {error!r}") from error
        if size not in self._pools:
            self._pools[size] = _Pool(size)
        try:
            return self._pools[size].run(fn, args, timeout_s)
        except BaseException:
            self._pools.pop(size).stop(now=True)
            raise

    def process_ids(self, size: int) -> list[int]:
        """The processes of a size's pool, by rank; empty when none is up."""
        pool = self._pools.get(size)
        return [process.pid or 0 for process in pool.processes] if pool else []

    def close(self) -> None:
        """End every process."""
        for pool in self._pools.values():
            pool.stop(now=False)
        self._pools.clear()


class _Pool:
    def __init__(self, size: int) -> None:
        context = forking()
        rendezvous = f"tcp://127.0.0.1:{_free_port()}"
        self._stacks = Path(tempfile.mkdtemp(prefix="gang-"))
        self._connections: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, size, rendezvous, theirs, str(self._stacks / str(rank)), dict(os.environ)),
                name=f"gang-{size}-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)
        try:
            self._collect(HANG_S, "joining")
        except BaseException:
            self.stop(now=True)
            raise

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        home = sys.modules[fn.__module__]
        # The module travels by name and file, apart from the function, so that a rank can import it first.
        task = pickle.dumps((fn.__module__, home.__file__, pickle.dumps((fn, args))))
        for connection in self._connections:
            connection.send_bytes(task)
        return self._collect(timeout_s, fn.__name__)

    def _collect(self, timeout_s: float, doing: str) -> list[Any]:
        """One answer from each rank, or GangFailure with what every rank has to say."""
        deadline = time.monotonic() + timeout_s
        ranks = range(len(self._connections))
        results: dict[int, Any] = {}
        troubles: dict[int, str] = {}
        while len(results) + len(troubles) < len(self._connections):
            awaited = [rank for rank in ranks if rank not in results and rank not in troubles]
            ready = wait([self._connections[rank] for rank in awaited], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in (rank for rank in awaited if self._connections[rank] in ready):
                try:
                    succeeded, answer = pickle.loads(self._connections[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(60.0)
                    exit_code = self.processes[rank].exitcode
                    succeeded, answer = False, f"died with exit code {exit_code}{self._last_words(rank)}"
                (results if succeeded else troubles)[rank] = answer
            if troubles:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        silence = f"was still busy {GRACE_S} s later" if troubles else f"gave no answer in {timeout_s} s"
        silent = [rank for rank in ranks if rank not in results and rank not in troubles]
        troubles |= {rank: f"{silence}\n{self._stack(rank)}" for rank in silent}
        if troubles:
            told = "\n".join(f"--- rank {rank}: {troubles[rank]}" for rank in sorted(troubles))
            raise GangFailure(f"{doing} failed on {len(troubles)} of {len(ranks)} ranks\n{told}")
        return [results[rank] for rank in ranks]

    def _stack(self, rank: int) -> str:
        """Where a busy rank's Python threads stand."""
        path = self._stacks / str(rank)
        if not path.exists():
            return "(it had not started)"
        os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.2)
        return path.read_text()

    def _last_words(self, rank: int) -> str:
        """Where the threads of a rank stood that a fatal signal ended, as NCCL's watchdog ends those whose collective
        hangs, and which of its collectives a card had not ended."""
        path = self._stacks / str(rank)
        told = [path.read_text() if path.exists() else "", of_flight_record(self._stacks / f"{FLIGHT_RECORDS}{rank}")]
        return "".join(f"\n{text}" for text in told if text)

    def stop(self, *, now: bool) -> None:
        """End the processes: by closing their pipe, by force after five seconds, or by force at once."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + (0.0 if now else 5.0)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for path in self._stacks.glob("*"):
            path.unlink()
        self._stacks.rmdir()


def _serve(
    rank: int, size: int, rendezvous: str, connection: Connection, stack_path: str, environment: dict[str, str]
) -> None:
    """A rank's life: join the gang, then answer calls until the pipe closes."""
    _die_with_parent()
    os.environ.update(environment)
    for variable in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):  # torch 2.13's name, and 2.11's
        os.environ[variable] = str(Path(stack_path).with_name(FLIGHT_RECORDS))
    with open(stack_path, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        faulthandler.enable(file=stacks)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        from gemray_workers.parallel.torch_communicator import join_gang

        comm = None

        def join() -> None:
            nonlocal comm
            comm = join_gang(rank, size, rendezvous, device="cpu", timeout_s=HANG_S)

        connection.send_bytes(_answer(join))
        while True:
            try:
                module, path, call = pickle.loads(connection.recv_bytes())
            except EOFError:
                break
            torch.set_default_dtype(torch.float32)
            torch.set_num_threads(1)
            connection.send_bytes(_answer(partial(_call, comm, module, path, call)))
        os._exit(0)  # the peers close at their own pace: nothing here is worth an orderly goodbye


def _call(comm: Any, module: str, path: str, call: bytes) -> Any:
    _import_from_file(module, path)
    fn, args = pickle.loads(call)
    return fn(comm, *args)


def _answer(fn: Callable[[], Any]) -> bytes:
    """(True, result) or (False, traceback), pickled: plain pickle copies tensors instead of sharing memory."""
    try:
        return pickle.dumps((True, fn()))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _import_from_file(module: str, path: str) -> None:
    """Import `module` under the name the test session gave it: pytest names modules by path, without packages."""
    folder = Path(path).parent
    parts = module.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        package = types.ModuleType(".".join(parts[:depth]))
        package.__path__ = [str(folder)]
        sys.modules.setdefault(package.__name__, package)
        folder = folder.parent
    importlib.import_module(module)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
