"""A `Launcher` over plain processes: the same gang and worker as under Ray, without Ray."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from gemray_cluster.gang.launcher import ProgressListener, Rank, RankDied
from gemray_workers.config import EngineConfig
from gemray_workers.rank.process import ProcessLocation
from gemray_workers.rank.worker import RankWorker
from support.processes.forking import forking

P = ParamSpec("P")
T = TypeVar("T")

NODE = ("this-machine", "127.0.0.1")


class ProcessLauncher:
    def __init__(self, engine: EngineConfig, worker_class: type[RankWorker] = RankWorker) -> None:
        self._engine, self._worker_class = engine, worker_class

    async def launch(self, num_ranks: int, progress: ProgressListener) -> list[Rank]:
        return await asyncio.to_thread(
            lambda: [ProcessRank(self._engine, rank, self._worker_class) for rank in range(num_ranks)]
        )

    async def here(self) -> tuple[str, str]:
        return NODE

    async def lost(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def release(self) -> None:
        pass


class ProcessRank:
    """A spawned process that answers calls over a pipe; one thread here reads the answers."""

    def __init__(self, engine: EngineConfig, rank: int, worker_class: type[RankWorker]) -> None:
        context = forking()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, engine, rank, worker_class), daemon=True)
        self.process.start()
        theirs.close()
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._calls = 0
        self._dead = False
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    async def kill(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.join, 5)

    async def call(self, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        with self._lock:
            if self._dead:
                raise RankDied("its process died")
            number, self._calls = self._calls, self._calls + 1
            self._waiting[number] = (loop, answer)
        self._pipe.send((number, method.__name__, args, kwargs))
        return await answer

    def _read(self) -> None:
        try:
            while True:
                number, result, error = self._pipe.recv()
                self._answer(self._waiting.pop(number), result, error)
        except (EOFError, OSError):
            self.process.join(60)
            with self._lock:
                self._dead = True
                died = RankDied(f"its process died (pid {self.process.pid}, exit code {self.process.exitcode})")
                for waiting in self._waiting.values():
                    self._answer(waiting, None, died)

    @staticmethod
    def _answer(waiting: tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]], result: Any, error: Any) -> None:
        loop, future = waiting

        def resolve() -> None:
            if not future.done():
                future.set_exception(error) if error is not None else future.set_result(result)

        if not loop.is_closed():
            loop.call_soon_threadsafe(resolve)


def _serve(pipe: Connection, engine: EngineConfig, rank: int, worker_class: type[RankWorker]) -> None:
    torch.set_num_threads(1)
    gpu = rank if engine.device == "cuda" else None
    worker = worker_class(engine, rank, lambda _config: ProcessLocation(*NODE, gpu=gpu))
    lock = threading.Lock()

    def answer(number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        result, error = None, None
        try:
            result = getattr(worker, method)(*args, **kwargs)
        except Exception as raised:
            error = raised
        with lock:
            pipe.send((number, result, error))

    while True:
        try:
            call = pipe.recv()
        except (EOFError, OSError):  # a killed parent that had not read everything resets the pipe
            os._exit(0)
        threading.Thread(target=answer, args=call, daemon=True).start()
