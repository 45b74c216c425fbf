"""The processes of a Ray that was started here: kept apart from the server's own, watched, and ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import ray
from ray._private import services

from gemray_cluster.ray_runtime import gcs
from gemray_cluster.ray_runtime.blocking import in_own_thread
from gemray_cluster.ray_runtime.group_ender import GroupEnder

logger = logging.getLogger(__name__)

VITAL = ("gcs_server", "raylet")
"""Without these Ray neither places nor watches anything; the others write logs and statistics."""
_WATCH_S = 0.2
_ANSWER_S = 5.0


@contextmanager
def in_sessions_of_their_own() -> Iterator[list[int]]:
    """Processes that Ray starts in the block lead sessions of their own; their ids, as they are started.

    A signal to the server's process group, as `timeout` and terminals send it, must not reach them: the server drains
    on it, and needs them until it has. That they end with the server stays as it is (Ray asks for a parent-death
    signal), and whoever ends the server's whole cgroup ends them, too.
    """
    popen, leaders = getattr(services, "ConsolePopen", None), list[int]()
    if popen is None:
        logger.warning(
            "this version of Ray starts its processes in a way unknown here: signals to our group reach them"
        )
        yield leaders
        return

    def start(*args: Any, **kwargs: Any) -> Any:
        process = popen(*args, start_new_session=True, **kwargs)
        leaders.append(process.pid)
        return process

    vars(services)["ConsolePopen"] = start
    try:
        yield leaders
    finally:
        vars(services)["ConsolePopen"] = popen


def kill_sessions(leaders: Collection[int]) -> None:
    """End every process of these sessions at once."""
    for pid in psutil.pids():
        try:
            if os.getsid(pid) in leaders:
                os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


class OwnProcesses:
    """Processes of the Ray that this process has just started."""

    def __init__(self, silence_s: float) -> None:
        """Look them up. `silence_s`: how long the GCS may say nothing before it counts as hung."""
        node: Any = ray._private.worker._global_node
        self._vital = [(name, info.process) for name in VITAL for info in node.all_processes.get(name, [])]
        self._sessions = {process.pid for _, process in self._vital} - {os.getsid(0)}
        self._gcs_address: str = node.gcs_address
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self._silence_s = silence_s
        self._has_answered = False
        self._given_up: str | None = None
        self._asking: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._ender: GroupEnder | None = None

    def end_with_us(self) -> None:
        """Have their groups end at once when this process is killed.

        Ray has its processes end with their parents, but for the agents, children of the raylet: they look for it every
        0.4 s, and then try for a minute to tell a GCS that is gone (Ray 2.60).
        """
        self._ender = GroupEnder(self._sessions)

    def dead(self) -> str | None:
        """Which of the vital ones is of no use any more, in words; None while all run."""
        if self._given_up is not None:
            return self._given_up
        for name, process in self._vital:
            code = process.poll()
            if code is not None:
                how = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
                return f"the {name} of our own Ray has ended (pid {process.pid}, {how})"
        return None

    @property
    def hangs(self) -> bool:
        """Whether one of them is there and of no use."""
        return self._given_up is not None

    async def lost(self) -> str:
        """Return when a vital one is of no use any more, with the cause."""
        while (cause := self.dead()) is None:
            await asyncio.sleep(_WATCH_S)
        return cause

    async def meet(self) -> None:
        """Ask the GCS whether it answers our way of asking: where it never has, as under Ray's TLS, silence later tells
        nothing."""
        self._has_answered = await gcs.answers(self._gcs_address, _ANSWER_S)

    async def can_be_asked(self) -> bool:
        """Whether Ray answers calls about what runs on it. Waits until the GCS has answered, or counts as hung.

        To be asked before such calls: nothing but them needs the GCS, so nobody notices one that hangs before.
        """
        if self.dead() is None and self._has_answered:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask_the_gcs())
            await asyncio.wait([self._asking])
        return self.dead() is None

    async def look(self) -> None:
        """Learn whether the GCS hangs, or Ray has given this node up.

        The raylet of a node that is given up hangs, and nothing is placed there again, whatever follows. No answer on
        the node within a few seconds tells nothing.

        For when a gang has failed, which it does of that, too. Not to be asked again and again: a process ends when its
        call to a GCS that was killed meanwhile has waited for a minute.
        """
        if not await self.can_be_asked():
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._ask_whether_given_up())
        await asyncio.wait([self._looking], timeout=_ANSWER_S)

    async def _ask_the_gcs(self) -> None:
        if not await gcs.answers(self._gcs_address, self._silence_s):
            self._given_up = f"the gcs_server of our own Ray has not answered for {self._silence_s:g} s"

    async def _ask_whether_given_up(self) -> None:
        try:
            is_alive = await in_own_thread(_is_alive, self._node_id)
        except Exception as error:  # Ray's errors have no common base
            logger.debug("Ray does not tell how this node is: %s", error)
            return
        if not is_alive:
            self._given_up = "our own Ray has given this node up: its raylet does not answer"

    def kill(self) -> None:
        """End them and all that they have started, ranks included, at once. Idempotent."""
        kill_sessions(self._sessions)
        if self._ender is not None:
            self._ender.let_go()


def _is_alive(node_id: str) -> bool:
    """Whether Ray counts on a node; what it does not know has not been given up."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return all(node["Alive"] for node in nodes if node["NodeID"] == node_id)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
