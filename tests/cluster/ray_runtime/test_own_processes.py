"""A Ray of our own is of no use when a vital process ends, and when Ray has given our node up."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.ray_runtime import own_processes, session
from gemray_cluster.ray_runtime.own_processes import OwnProcesses
from gemray_cluster.ray_runtime.session import RaySession
from support.waiting import HANG_S


class Told:
    """What Ray says of our node: alive or not, when `may_answer` is set."""

    def __init__(self) -> None:
        self.is_alive = True
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.num_asked = 0

    def __call__(self, node_id: str) -> bool:
        assert node_id == "ours"
        self.num_asked += 1
        self.may_answer.wait(HANG_S)
        return self.is_alive


@pytest.fixture
def raylet(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that Ray's library takes for the raylet that it has started."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    node = SimpleNamespace(all_processes={"raylet": [SimpleNamespace(process=process)]})
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "ours"))
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    answer = Told()
    monkeypatch.setattr(own_processes, "_is_alive", answer)
    yield answer
    answer.may_answer.set()


async def test_a_killed_one(raylet: subprocess.Popen[bytes], told: Told) -> None:
    processes = OwnProcesses()
    assert processes.dead() is None
    raylet.kill()
    cause = await asyncio.wait_for(processes.lost(), HANG_S)
    assert cause == f"the raylet of our own Ray has ended (pid {raylet.pid}, killed by SIGKILL)"


async def test_one_that_hangs(raylet: subprocess.Popen[bytes], told: Told) -> None:
    processes = OwnProcesses()
    losing = asyncio.create_task(processes.lost())
    await processes.look()
    assert processes.dead() is None, "alive"
    told.is_alive = False
    await processes.look()
    cause = await asyncio.wait_for(losing, HANG_S)
    assert "given this node up" in cause
    assert processes.dead() == cause
    assert raylet.poll() is None
    processes.kill()
    assert raylet.wait(HANG_S) == -signal.SIGKILL


async def test_no_answer_tells_nothing_and_is_not_asked_for_twice(
    raylet: subprocess.Popen[bytes], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_processes, "_ANSWER_S", 0.01)
    told.may_answer.clear()
    told.is_alive = False
    processes = OwnProcesses()
    for _ in range(3):
        await processes.look()
        assert processes.dead() is None
    assert told.num_asked == 1


async def test_it_is_started_again(
    raylet: subprocess.Popen[bytes], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ClusterConfig] = []

    async def start(config: ClusterConfig) -> None:
        started.append(config)
        told.is_alive = True
        another = SimpleNamespace(process=SimpleNamespace(pid=-1, poll=lambda: None))
        monkeypatch.setattr(ray._private.worker, "_global_node", SimpleNamespace(all_processes={"raylet": [another]}))

    monkeypatch.setattr(session, "_start", start)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    config = ClusterConfig()
    running = RaySession(config, owned=True)
    await running.repair()
    assert started == []
    told.is_alive = False  # nobody has noticed but Ray, as when a gang fails of it
    await asyncio.gather(running.repair(), running.repair())
    assert started == [config]
    assert raylet.wait(HANG_S) == -signal.SIGKILL


def test_what_ray_says_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeID": "ours", "Alive": False}, {"NodeID": "another", "Alive": True}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert [own_processes._is_alive(node) for node in ("ours", "another", "unknown")] == [False, True, True]
