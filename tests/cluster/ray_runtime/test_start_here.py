"""Why Ray cannot start on this machine is told with what to do."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.ray_runtime import session
from gemray_workers.rank.waiting_threads import SPINS


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
    for name in (session.AUTH_MODE, session.NOSET_DEVICES, SPINS):  # set by `open`, and given back as they were
        no_ray.setenv(name, os.environ.get(name, ""))
    no_ray.setattr(session, "get_num_cpus", lambda: 64)
    no_ray.setattr(session, "_init", lambda num_cpus, **others: given.append(num_cpus))
    no_ray.setattr(session, "OwnProcesses", FakeProcesses)
    no_ray.setattr(ray, "is_initialized", lambda: False)
    await session.RaySession.open(config, num_ranks=num_ranks)
    assert given == [expected]
