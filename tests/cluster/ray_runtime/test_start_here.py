"""Why Ray cannot start on this machine is told with what to do."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import services

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.ray_runtime import session
from gemray_workers.rank.waiting_threads import SPINS
from support.waiting import HANG_S


def _failing_with(error: Exception) -> Any:
    def init(**arguments: Any) -> None:
        raise error

    return init


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Ray does not start; its temporary directory is a test's, with room."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    return monkeypatch


def _message() -> str:
    with pytest.raises(session.ClusterUnreachable) as error:
        session._start_here(ClusterConfig())
    return str(error.value)


def test_a_home_that_cannot_be_written(no_ray: pytest.MonkeyPatch) -> None:
    refused = OSError(errno.EROFS, os.strerror(errno.EROFS), "/home/someone/.ray")
    no_ray.setattr(session, "_init", _failing_with(refused))
    assert "Read-only file system: '/home/someone/.ray': its token would lie there; set RAY_AUTH_TOKEN" in _message()


def test_a_home_that_is_full(no_ray: pytest.MonkeyPatch) -> None:
    """A write that fails names no file."""
    no_ray.setattr(session, "_init", _failing_with(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert _message() == "cannot start Ray on this machine: [Errno 28] No space left on device"
    home = Path("/home/someone")
    no_ray.setenv("HOME", str(home))
    no_ray.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0 if path == home else 1 << 40))
    assert f"left on device: {home}, where its token would lie, is full; set RAY_AUTH_TOKEN" in _message()


def test_a_full_temporary_directory(no_ray: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_ray.setattr(session, "_init", _failing_with(RuntimeError("The current node timed out during startup.")))
    no_ray.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 20))
    assert f"timed out during startup: {tmp_path}, where it keeps its session, has 3 MiB free" in _message()


def test_anything_else_is_told_as_ray_tells_it(no_ray: pytest.MonkeyPatch) -> None:
    no_ray.setattr(session, "_init", _failing_with(RuntimeError("Something else.")))
    assert _message() == "cannot start Ray on this machine: Something else"


def test_a_temporary_directory_that_is_not_there_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "later"))
    monkeypatch.setattr(session, "_init", _failing_with(RuntimeError("Something else.")))
    assert _message() == "cannot start Ray on this machine: Something else"


class Raylets:
    """Stand in Ray's place: processes are started, and do not come up until it is the turn of the last."""

    def __init__(self, num_lost: int) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self._num_lost = num_lost

    def __call__(self, **arguments: Any) -> None:
        popen: Any = vars(services)["ConsolePopen"]
        self.started.append(popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        if len(self.started) <= self._num_lost:
            raise Exception("The current node timed out during startup. This could happen because ...")  # as Ray does


@pytest.fixture
def raylets(no_ray: pytest.MonkeyPatch) -> Iterator[Callable[[int], Raylets]]:
    made: list[Raylets] = []

    def make(num_lost: int) -> Raylets:
        made.append(Raylets(num_lost))
        no_ray.setattr(session, "_init", made[-1])
        return made[-1]

    yield make
    for process in (process for each in made for process in each.started):
        process.kill()
        process.wait()


@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_node_that_does_not_come_up_is_started_again(raylets: Callable[[int], Raylets], num_lost: int) -> None:
    """Nothing of those before is left."""
    ray = raylets(num_lost)
    session._start_here(ClusterConfig())
    *lost, last = ray.started
    assert [process.wait(HANG_S) for process in lost] == [-signal.SIGKILL] * num_lost
    assert last.poll() is None


def test_a_node_that_never_comes_up_is_told(raylets: Callable[[int], Raylets]) -> None:
    ray = raylets(3)
    assert "cannot start Ray on this machine: The current node timed out during startup" in _message()
    assert [process.wait(HANG_S) for process in ray.started] == [-signal.SIGKILL] * 3


def test_what_another_start_would_not_mend_is_told_at_once(
    raylets: Callable[[int], Raylets], no_ray: pytest.MonkeyPatch
) -> None:
    ray = raylets(2)
    no_ray.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 20))
    assert "has 3 MiB free" in _message()
    assert len(ray.started) == 1


class FakeProcesses:
    def __init__(self, silence_s: float) -> None:
        """None to watch."""

    def end_with_us(self) -> None:
        """Nothing to end."""

    async def meet(self) -> None:
        """Nobody to ask."""


@pytest.mark.parametrize(
    ("config", "num_ranks", "expected"),
    [
        (ClusterConfig(), 2, 2),
        (ClusterConfig(cpus_per_rank=3), 4, 12),
        (ClusterConfig(), 65, 64),  # placement will wait, and say for what
        (ClusterConfig(local_num_cpus=100), 2, 100),
    ],
)
async def test_a_big_host_starts_no_more_processes_ahead_than_there_are_ranks(
    no_ray: pytest.MonkeyPatch, config: ClusterConfig, num_ranks: int, expected: int
) -> None:
    """As Ray starts one for each CPU that it is given."""
    given: list[int] = []
    set_by_open = (session.AUTH_MODE, session.NOSET_DEVICES, session.NICENESS, SPINS)
    for name in set_by_open:  # and given back as they were
        no_ray.setenv(name, os.environ.get(name, ""))
    no_ray.setattr(session, "get_num_cpus", lambda: 64)
    no_ray.setattr(session, "_init", lambda num_cpus, **others: given.append(num_cpus))
    no_ray.setattr(session, "OwnProcesses", FakeProcesses)
    no_ray.setattr(ray, "is_initialized", lambda: False)
    await session.RaySession.open(config, num_ranks=num_ranks)
    assert given == [expected]
