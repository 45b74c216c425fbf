"""Joining a Ray cluster, or starting one on this machine."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray._private.utils import get_num_cpus

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.ray_runtime.blocking import in_own_thread
from gemray_cluster.ray_runtime.own_processes import OwnProcesses, in_sessions_of_their_own, kill_sessions
from gemray_cluster.ray_runtime.unused_processes import without_unused_processes
from gemray_workers.errors import GemrayError
from gemray_workers.rank.waiting_threads import waiting_threads

logger = logging.getLogger(__name__)

AUTH_MODE = "RAY_AUTH_MODE"
NOSET_DEVICES = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
NICENESS = "RAY_worker_niceness"
"""What Ray adds to a worker's niceness, 15 by itself: a rank would wait for whatever else wants its core."""
_OBJECT_STORE_BYTES = 128 * 2**20
"""Object store of a Ray started here: gangs keep nothing in it, and its default takes 30% of the memory."""
_LEAST_TEMPORARY_BYTES = 64 * 2**20
"""Sockets and logs of a Ray session take a few MiB to begin with."""
_FULL_BYTES = 64 * 2**10
"""A directory with less room is taken to be full."""
_NOT_UP = "timed out during startup"
"""What Ray's library says of a raylet that has not registered, most often as it has ended: it gives its agent, which
imports for seconds, 15 s (Ray 2.60), too few where a machine is busy or reads from a cold disk."""
_STARTS = 3
"""Starts of a node that does not come up: where a machine is that busy, the second may be too slow as well."""
_RETRY_S = 0.5
_ANSWER_S = 2.0
_CLOSE_DEADLINE_S = 10.0
_LEFT_BEHIND_S = 90.0
"""Longer than Ray's library waits for a GCS that has died."""


class ClusterUnreachable(GemrayError):
    """There is no Ray cluster at the address, or it refuses us."""


class RaySession:
    """This process's connection to Ray. It outlives gangs, so that a failed one can be rebuilt.

    A Ray that was started here is watched: `failure` tells when it has died, and `repair` starts another.
    """

    def __init__(self, config: ClusterConfig, *, owned: bool, processes: OwnProcesses | None = None) -> None:
        """Use `open`. `owned`: whether `close` disconnects; `processes`: those of a Ray that was started here."""
        self._config = config
        self._owned = owned
        self._processes = processes
        self._repairing = asyncio.Lock()

    @classmethod
    async def open(cls, config: ClusterConfig, *, num_ranks: int) -> RaySession:
        """Connect to `config.address` or start Ray here; a connection that this process already has is used as is.

        A Ray that is started here gets CPUs for `num_ranks` ranks, the most that will run at a time, as far as the
        machine has cores: it starts a process ahead for each CPU, and counts as started when these are up.

        Authentication is on unless the environment's RAY_AUTH_MODE says otherwise: a Ray that is started here makes
        its token by itself, a cluster's token is read from ~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.

        Raises ClusterUnreachable.
        """
        if ray.is_initialized():
            return cls(config, owned=False)
        # Set before `import ray` (cli/ray_environment.py does): its processes read it at different times.
        os.environ.setdefault(AUTH_MODE, "token")
        # Ranks of one node must all see every card: symmetric memory refuses two ranks that both say "device 0".
        os.environ[NOSET_DEVICES] = "1"
        os.environ.setdefault(NICENESS, "0")
        os.environ.update(waiting_threads(os.environ))
        if config.address is None:
            config = replace(config, local_num_cpus=_num_cpus(config, num_ranks))
            return cls(config, owned=True, processes=await _start(config))
        logger.info("joining the Ray cluster at %s", config.address)
        await _reach(config.address, config.connect_deadline_s)
        await asyncio.to_thread(_join, config)
        return cls(config, owned=True)

    async def close(self) -> None:
        """Disconnect, and end a Ray that was started here. Idempotent."""
        if not self._owned:
            return
        self._owned = False
        await self._shut_down()

    @property
    def processes(self) -> OwnProcesses | None:
        """Those of our own Ray of the moment, which `repair` replaces; None for a cluster's."""
        return self._processes

    @property
    def failure(self) -> str | None:
        """Why our own Ray is of no use any more; None while it runs, and for a cluster's."""
        return None if self._processes is None else self._processes.dead()

    async def repair(self) -> None:
        """Start Ray again if our own has died or hangs; for all who find it so at the same time, once.

        Raises ClusterUnreachable.
        """
        async with self._repairing:
            if self._processes is not None and self.failure is None:
                await self._processes.look()  # a gang may have failed because Ray gave its node up
            if self.failure is None:
                return
            logger.warning("%s: starting another", self.failure)
            leaving = await self._shut_down()
            # At its end it ends the processes of whichever Ray is there, and forgets it.
            await asyncio.wait([leaving], timeout=_LEFT_BEHIND_S)
            self._processes = await _start(self._config)

    async def _shut_down(self) -> asyncio.Future[None]:
        """Leave Ray, and end our own: what takes leave, which may not have ended."""
        if self._processes is not None and not await _lets_go(self._processes):
            self._processes.kill()
        leaving = asyncio.ensure_future(in_own_thread(ray.shutdown))
        await asyncio.wait([leaving], timeout=_CLOSE_DEADLINE_S)
        if leaving.done():
            leaving.result()
        else:
            logger.error("Ray did not let go of us within %g s: its processes have ended or hang", _CLOSE_DEADLINE_S)
        if self._processes is not None:
            self._processes.kill()
        return leaving


async def _lets_go(own_ray: OwnProcesses) -> bool:
    """Whether Ray's library can take leave of our own Ray: it waits for processes that hang, not for dead ones."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            await own_ray.can_be_asked()
    except TimeoutError:
        return False
    return not own_ray.hangs


async def _start(config: ClusterConfig) -> OwnProcesses:
    """Start Ray here: its processes. Raises ClusterUnreachable."""
    logger.info("starting Ray on this machine")
    began = time.monotonic()
    # On the executor's thread: Ray's processes end with the thread that started them.
    await asyncio.to_thread(_start_here, config)
    _take_signals_back()
    logger.info("Ray started in %.1f s", time.monotonic() - began)
    processes = OwnProcesses(config.heartbeat_deadline_s)
    processes.end_with_us()
    await processes.meet()
    return processes


def _take_signals_back() -> None:
    """Ray's library has put handlers of its own in place of ours, behind Python's back."""
    if threading.current_thread() is not threading.main_thread():
        return  # nobody can have set one from here
    for number in (signal.SIGTERM, signal.SIGINT):
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)


async def _reach(address: str, deadline_s: float) -> None:
    """Wait until something listens at the head's address: Ray itself would try a wrong one for minutes.

    Raises ClusterUnreachable at the deadline.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "://" in address:
        return  # "auto" and ray:// addresses are Ray's to resolve
    until = time.monotonic() + deadline_s
    while True:
        try:
            async with asyncio.timeout(max(0.1, until - time.monotonic())):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            return
        except OSError as error:  # TimeoutError is one
            if time.monotonic() + _RETRY_S >= until:
                raise ClusterUnreachable(
                    f"no Ray head answers at {address} within {deadline_s:g} s: {error or type(error).__name__}"
                ) from error
        await asyncio.sleep(_RETRY_S)


def _join(config: ClusterConfig) -> None:
    try:
        _init(address=config.address, namespace=config.namespace)
    except Exception as error:  # Ray raises ConnectionError, RuntimeError, ValueError, AuthenticationError
        raise ClusterUnreachable(
            f"cannot join the Ray cluster at {config.address} ({AUTH_MODE}={os.environ[AUTH_MODE]}): {error}; "
            "if the head is up, check that the token and the Ray version are the cluster's"
        ) from error


def _num_cpus(config: ClusterConfig, num_ranks: int) -> int:
    """CPUs of a Ray that is started here. Where the ranks want more than there are, placement says so."""
    return config.local_num_cpus or min(num_ranks * config.cpus_per_rank, max(1, int(get_num_cpus())))


def _start_here(config: ClusterConfig) -> None:
    for starts_left in reversed(range(_STARTS)):
        try:
            _start_node(config)
            return
        except Exception as error:
            hint = _hint(error)
            if _NOT_UP not in str(error) or hint or not starts_left:
                reason = f"{str(error).rstrip('.')}{hint}"
                raise ClusterUnreachable(f"cannot start Ray on this machine: {reason}") from error
            logger.warning("Ray's node did not come up: starting it again")


def _start_node(config: ClusterConfig) -> None:
    """Start Ray's processes and connect to them; none of them is left where that fails."""
    with in_sessions_of_their_own() as leaders, without_unused_processes():
        try:
            _init(
                address="local",
                namespace=config.namespace,
                num_cpus=config.local_num_cpus,
                num_gpus=config.local_num_gpus,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
            )
        except BaseException:
            kill_sessions(leaders)
            raise


def _hint(error: Exception) -> str:
    """What to do about a home or a temporary directory that Ray cannot write to: it says little of either."""
    if isinstance(error, OSError) and error.filename is not None and ".ray" in Path(error.filename).parts:
        return ": its token would lie there; set RAY_AUTH_TOKEN, or HOME to a directory that can be written"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and _is_full(Path.home()):
        return f": {Path.home()}, where its token would lie, is full; set RAY_AUTH_TOKEN, or HOME to another directory"
    directory = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    try:
        free = shutil.disk_usage(directory).free
    except OSError:  # Ray makes it where it can
        return ""
    if free < _LEAST_TEMPORARY_BYTES:
        return f": {directory}, where it keeps its session, has {free >> 20} MiB free; RAY_TMPDIR names another place"
    return ""


def _is_full(directory: Path) -> bool:
    try:
        return shutil.disk_usage(directory).free < _FULL_BYTES
    except OSError:
        return False


def _init(**arguments: Any) -> None:
    ray_logger = logging.getLogger("ray._private.worker")
    ray_logger.addFilter(_is_news)
    try:
        ray.init(logging_level=logging.WARNING, **arguments)
    finally:
        ray_logger.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """All but one: off the main thread Ray sets no SIGTERM handler, and a server has its own."""
    return "SIGTERM handler is not set" not in record.getMessage()
