"""A Ray of our own is of no use when a vital process ends, when its GCS hangs, and when Ray has given our node up."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
import ray

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.ray_runtime import gcs, own_processes, session
from gemray_cluster.ray_runtime.own_processes import OwnProcesses
from gemray_cluster.ray_runtime.session import RaySession
from support.waiting import HANG_S, eventually


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


class FakeGcs:
    """Answers whether it is alive, when `may_answer` is set; with `refusal`, as to who brings no token."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.refusal: grpc.StatusCode | None = None
        self.num_asked = 0
        self.address = ""

    def handler(self) -> Any:
        service, method = gcs.CHECK_ALIVE.strip("/").split("/")
        return grpc.method_handlers_generic_handler(
            service, {method: grpc.unary_unary_rpc_method_handler(self._check_alive)}
        )

    async def _check_alive(self, _request: bytes, context: Any) -> bytes:
        self.num_asked += 1
        await self.may_answer.wait()
        if self.refusal is not None:
            await context.abort(self.refusal, "as told")
        return b""


@pytest_asyncio.fixture
async def fake_gcs() -> AsyncIterator[FakeGcs]:
    fake = FakeGcs()
    server = grpc.aio.server(handlers=[fake.handler()])
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield fake
    await server.stop(None)


@pytest.fixture
def raylet(monkeypatch: pytest.MonkeyPatch, fake_gcs: FakeGcs) -> Iterator[subprocess.Popen[bytes]]:
    """A process that Ray's library takes for the raylet that it has started."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    node = SimpleNamespace(all_processes={"raylet": [SimpleNamespace(process=process)]}, gcs_address=fake_gcs.address)
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
    processes = OwnProcesses(HANG_S)
    assert processes.dead() is None
    raylet.kill()
    cause = await asyncio.wait_for(processes.lost(), HANG_S)
    assert cause == f"the raylet of our own Ray has ended (pid {raylet.pid}, killed by SIGKILL)"


async def test_one_that_hangs(raylet: subprocess.Popen[bytes], told: Told) -> None:
    processes = OwnProcesses(HANG_S)
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


async def test_they_end_with_us_until_they_are_killed(raylet: subprocess.Popen[bytes]) -> None:
    """What would end them then must not wait on: their ids may be given to others."""
    children = psutil.Process().children
    before = children()
    processes = OwnProcesses(HANG_S)
    processes.end_with_us()
    (shell,) = [child for child in children() if child not in before]
    await eventually(lambda: f"kill -s KILL -- -{raylet.pid}" in " ".join(shell.cmdline()))
    processes.kill()
    assert not shell.is_running()
    assert raylet.wait(HANG_S) == -signal.SIGKILL


async def test_no_answer_tells_nothing_and_is_not_asked_for_twice(
    raylet: subprocess.Popen[bytes], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_processes, "_ANSWER_S", 0.01)
    told.may_answer.clear()
    told.is_alive = False
    processes = OwnProcesses(HANG_S)
    for _ in range(3):
        await processes.look()
        assert processes.dead() is None
    await eventually(lambda: told.num_asked > 0)  # by a thread
    assert told.num_asked == 1


@pytest.mark.parametrize("refusal", [None, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED])
async def test_a_gcs_that_hangs(
    raylet: subprocess.Popen[bytes], told: Told, fake_gcs: FakeGcs, refusal: grpc.StatusCode | None
) -> None:
    """It is asked beside Ray's library, which must have no call waiting when it is killed."""
    fake_gcs.refusal = refusal
    patient = OwnProcesses(HANG_S)
    await patient.meet()
    assert await patient.can_be_asked()
    processes = OwnProcesses(0.2)
    await processes.meet()
    fake_gcs.may_answer.clear()
    asked = fake_gcs.num_asked
    assert not any(await asyncio.gather(*(processes.can_be_asked() for _ in range(4))))
    assert fake_gcs.num_asked <= asked + 1, "once for all, and not even that where the machine is slow"
    await processes.look()
    assert told.num_asked == 0
    assert processes.dead() == "the gcs_server of our own Ray has not answered for 0.2 s"
    assert await processes.lost() == processes.dead()


async def test_a_gcs_that_answers_late(raylet: subprocess.Popen[bytes], told: Told, fake_gcs: FakeGcs) -> None:
    processes = OwnProcesses(HANG_S)
    await processes.meet()
    fake_gcs.may_answer.clear()
    asking = asyncio.create_task(processes.can_be_asked())
    await eventually(lambda: fake_gcs.num_asked == 2)
    assert not asking.done()
    fake_gcs.may_answer.set()
    assert await asyncio.wait_for(asking, HANG_S)


async def test_a_gcs_that_never_answered_us_does_not_hang(
    raylet: subprocess.Popen[bytes], told: Told, fake_gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under Ray's TLS, say, it understands nothing of what we say."""
    monkeypatch.setattr(own_processes, "_ANSWER_S", 0.1)
    fake_gcs.may_answer.clear()
    processes = OwnProcesses(0.1)
    await processes.meet()
    assert await processes.can_be_asked()


async def test_it_is_started_again(
    raylet: subprocess.Popen[bytes], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ClusterConfig] = []

    async def start(config: ClusterConfig) -> OwnProcesses:
        started.append(config)
        told.is_alive = True
        another = SimpleNamespace(process=SimpleNamespace(pid=-1, poll=lambda: None))
        node = SimpleNamespace(all_processes={"raylet": [another]}, gcs_address="nowhere:1")
        monkeypatch.setattr(ray._private.worker, "_global_node", node)
        return OwnProcesses(HANG_S)

    monkeypatch.setattr(session, "_start", start)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    config = ClusterConfig()
    running = RaySession(config, owned=True, processes=OwnProcesses(HANG_S))
    await running.repair()
    assert started == []
    told.is_alive = False  # nobody has noticed but Ray, as when a gang fails of it
    await asyncio.gather(running.repair(), running.repair())
    assert started == [config]
    assert raylet.wait(HANG_S) == -signal.SIGKILL


async def test_another_ray_is_started_once_the_first_is_left(
    raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of Ray's shutdown would end the other one."""
    done: list[str] = []
    may_end = threading.Event()

    def leave() -> None:
        may_end.wait(HANG_S)
        done.append("left")

    def kill(_: OwnProcesses) -> None:
        done.append("kill")
        asyncio.get_running_loop().call_later(0.1, may_end.set)

    async def start(_: ClusterConfig) -> OwnProcesses:
        done.append("start")
        return processes

    monkeypatch.setattr(session, "_CLOSE_DEADLINE_S", 0.01)
    monkeypatch.setattr(session, "_start", start)
    monkeypatch.setattr(ray, "shutdown", leave)
    monkeypatch.setattr(OwnProcesses, "kill", kill)
    processes = OwnProcesses(HANG_S)
    raylet.kill()
    raylet.wait()
    await RaySession(ClusterConfig(), owned=True, processes=processes).repair()
    assert done == ["kill", "left", "start"]


@pytest.mark.parametrize(("hangs", "order"), [(False, ["leave", "kill"]), (True, ["kill", "leave", "kill"])])
async def test_ray_is_left_in_the_order_that_ends(
    raylet: subprocess.Popen[bytes], told: Told, monkeypatch: pytest.MonkeyPatch, hangs: bool, order: list[str]
) -> None:
    """Ray's library waits for processes that hang, and for seconds longer for a GCS that we have killed."""
    done: list[str] = []
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("leave"))
    monkeypatch.setattr(OwnProcesses, "kill", lambda self: done.append("kill"))
    processes = OwnProcesses(HANG_S)
    if hangs:
        told.is_alive = False
        await processes.look()
    else:
        raylet.kill()
        raylet.wait()
    await RaySession(ClusterConfig(), owned=True, processes=processes).close()
    assert done == order


async def test_a_gcs_that_is_silent_at_the_end_is_not_waited_for(
    raylet: subprocess.Popen[bytes], told: Told, fake_gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_ANSWER_S", 0.1)
    monkeypatch.setattr(ray, "shutdown", lambda: raylet.wait(HANG_S))
    processes = OwnProcesses(HANG_S)
    await processes.meet()
    fake_gcs.may_answer.clear()
    await RaySession(ClusterConfig(), owned=True, processes=processes).close()
    assert raylet.poll() == -signal.SIGKILL


def test_what_ray_says_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeID": "ours", "Alive": False}, {"NodeID": "another", "Alive": True}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert [own_processes._is_alive(node) for node in ("ours", "another", "unknown")] == [False, True, True]
