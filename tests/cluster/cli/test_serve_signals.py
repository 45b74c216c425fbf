"""Signals and deaths around `gemray serve` with a Ray of its own: streams outlive them, nothing outlives the server.

One rank each: what they show does not depend on how many there are. `test_serve_for_real.py` has a server of two.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gemray.client import AsyncClient, Retry
from gemray.v1 import generation_pb2 as pb
from support.checkpoints.servable_checkpoint import write_servable_checkpoint
from support.cluster.command import GEMRAY, killed_at_last
from support.cluster.forked_command import ForkedCommand
from support.cluster.ray_turns import in_turn
from support.cluster.serve_process import (
    PATIENCE,
    START_S,
    gone,
    line_with,
    processes_of,
    ranks_of,
    ray_of,
    served,
    starting,
)  # fmt: skip
from support.cluster.server_streams import NUM_TOKENS, Reader, reading
from support.waiting import HANG_S, eventually

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def terminate_all(pid: int) -> None:
    """Send SIGTERM to a process and its descendants, of which some may end before it is their turn."""
    for each in processes_of(pid):
        with suppress(psutil.NoSuchProcess):
            each.terminate()


async def test_nothing_outlives_a_killed_server_but_its_streams(tmp_path: Path) -> None:
    """Sessions of their own must not make orphans of Ray's processes.

    The next server at the port, started at once, goes on with the answers that clients have begun to read. A signal to
    every process of it at once, as systemd sends it to those of a service, ends it in order, though it ends Ray, too.
    """
    model, port = write_servable_checkpoint(tmp_path / "model"), free_port()
    async with AsyncClient(f"127.0.0.1:{port}", retry=Retry(first_s=START_S, resume_s=START_S)) as client:
        async with starting(model, "--tp", "1", port=port, cpus=1) as process:
            await asyncio.wait_for(line_with(process, "ready: serving"), START_S)
            expected = [await read(client, seed) for seed in range(3)]
            everything = processes_of(process.pid)
            assert {"raylet", "gcs_server"} < {p.name() for p in everything}
            assert any(p.name().endswith("Agent") for p in everything)
            scripts = {Path(argument).name for p in everything for argument in p.cmdline()}
            assert "log_monitor.py" in scripts
            assert not scripts & {"monitor.py", "dashboard.py"}, "nobody needs them"
            shared = shared_memory_of(everything)
            begun = [asyncio.Event() for _ in expected]
            streams = [asyncio.create_task(read(client, seed, event)) for seed, event in enumerate(begun)]
            await asyncio.gather(*(event.wait() for event in begun))
            process.kill()
        async with starting(model, "--tp", "1", port=port, cpus=1) as process:
            assert await asyncio.wait_for(asyncio.gather(*streams), START_S) == expected
            await eventually(lambda: gone(everything))
            assert not [path for path in shared if path.exists()]
            terminate_all(process.pid)
            assert await asyncio.wait_for(process.wait(), HANG_S) == 0


async def read(client: AsyncClient, seed: int, begun: asyncio.Event | None = None) -> list[int]:
    """The ids of one answer."""
    sampling = pb.SamplingParameters(seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
    ids: list[int] = []
    async for message in client.stream(pb.GenerateStreamRequest(text="import this", sampling=sampling)):
        ids += message.delta.token_ids
        if begun is not None:
            begun.set()
    return ids


def shared_memory_of(processes: list[psutil.Process]) -> set[Path]:
    """What they map of /dev/shm."""
    paths: set[Path] = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            paths |= {Path(each.path) for each in process.memory_maps() if each.path.startswith("/dev/shm/")}
    return paths


async def test_a_ray_that_dies_is_started_again(tmp_path: Path) -> None:
    """At the cost of one rebuild each time; without another, a killed rank ends the server."""
    model = write_servable_checkpoint(tmp_path / "model")
    victims = ("raylet", "gcs_server")
    async with served(model, "--max-rebuilds", str(len(victims)), tp=1) as (process, channel):
        (expected,) = [await reader.read_on() for reader in await reading(channel, 1)]
        for victim in victims:
            readers = await reading(channel, 5)
            ray_of(process, victim).kill()
            line = await asyncio.wait_for(line_with(process, "the gang failed"), HANG_S)
            assert f"the {victim} of our own Ray has ended" in line
            assert "killed by SIGKILL" in line
            found = await asyncio.wait_for(asyncio.gather(*(reader.read_on() for reader in readers)), HANG_S)
            assert found[0] == expected
        (rank,) = ranks_of(process)
        rank.kill()
        line = await asyncio.wait_for(line_with(process, "error: "), HANG_S)
        assert line.startswith(f"error: the gang failed: rank 0: its process died (pid {rank.pid}")
        assert await asyncio.wait_for(process.wait(), HANG_S) == 1


async def test_a_signal_that_ends_ray_while_ranks_wait_for_room_ends_the_server(tmp_path: Path) -> None:
    """They wait for a second node."""
    apart = "--tp", "2", "--strategy", "strict_spread"
    async with starting(write_servable_checkpoint(tmp_path / "model"), *apart) as process:
        await asyncio.wait_for(line_with(process, "for resources: wanted 2 x"), START_S)
        terminate_all(process.pid)
        await asyncio.wait_for(line_with(process, "ended before the gang was ready"), HANG_S)
        assert await asyncio.wait_for(process.wait(), HANG_S) == 130


async def draining(pid: int, *more: str) -> ForkedCommand:
    """A `gemray drain` that has begun."""
    return await ForkedCommand.start("drain", "--pid", str(pid), *more)


@contextmanager
def held(ranks: list[psutil.Process]) -> Iterator[None]:
    """Streams that do not end in the block, as the ranks stand still."""
    for rank in ranks:
        rank.suspend()
    try:
        yield
    finally:
        for rank in ranks:
            rank.resume()


async def test_draining_again_loses_no_stream(tmp_path: Path) -> None:
    """Nor does the first SIGTERM that follows, as Kubernetes sends it after a preStop."""
    async with served(write_servable_checkpoint(tmp_path / "model"), tp=1) as (process, channel):
        ranks = ranks_of(process)  # to look for them takes time, in which the answers would go on
        readers = [Reader(channel, seed, num_tokens=1000) for seed in range(2)]
        await asyncio.gather(*(reader.began.wait() for reader in readers))
        with held(ranks):
            first = await draining(process.pid)
            await asyncio.wait_for(line_with(process, "draining 2 requests"), HANG_S)
            for _ in range(2):
                again = await draining(process.pid, "--deadline-s", "0")
                _, said = await asyncio.wait_for(again.communicate(), HANG_S)
                assert (again.returncode, said) == (0, b"")
            process.terminate()
        await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), HANG_S)
        assert [len(reader.ids) for reader in readers] == [1000, 1000]
        assert await asyncio.wait_for(process.wait(), HANG_S) == 0
        _, said = await asyncio.wait_for(first.communicate(), HANG_S)
        assert (first.returncode, said.decode().splitlines()[-1]) == (0, "ended")


async def test_a_drain_that_takes_too_long_says_whom_it_cut(tmp_path: Path) -> None:
    model = write_servable_checkpoint(tmp_path / "model")
    async with served(model, "--drain-deadline-s", "0", tp=1) as (process, channel):
        ranks = ranks_of(process)  # to look for them takes time, in which the answers would go on
        readers = [Reader(channel, seed, num_tokens=1000) for seed in range(2)]
        await asyncio.gather(*(reader.began.wait() for reader in readers))
        with held(ranks):
            drain = await draining(process.pid)
            cut = await asyncio.wait_for(
                asyncio.gather(*(reader.task for reader in readers), return_exceptions=True), HANG_S
            )
        line = await asyncio.wait_for(line_with(process, "error: "), HANG_S)
        assert line == "error: 2 requests were cut: they had not finished within drain_deadline_s = 0\n"
        assert await asyncio.wait_for(process.wait(), HANG_S) == 5
        _, said = await asyncio.wait_for(drain.communicate(), HANG_S)
        assert said.decode().endswith(line)
        assert drain.returncode == 5
        assert all(isinstance(error, grpc.aio.AioRpcError) for error in cut)


async def test_a_full_disk_under_stderr_decides_nothing(tmp_path: Path) -> None:
    """What the server writes is lost; it starts, serves and, at Ctrl-C, drains and ends as usual."""
    model = write_servable_checkpoint(tmp_path / "model")
    port = free_port()
    flags = ["--model", str(model), *PATIENCE, "--port", str(port), "--kv-memory", "32MiB", "--device", "cpu"]
    flags += ["--local-num-cpus", "1", "--local-num-gpus", "0"]
    with Path("/dev/full").open("w") as full:
        process = await in_turn(
            asyncio.create_subprocess_exec(*GEMRAY, "serve", *flags, stderr=full, start_new_session=True)
        )
    async with killed_at_last(process):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            async with asyncio.timeout(START_S):
                while not await is_serving(health):
                    assert process.returncode is None, process.returncode
                    await asyncio.sleep(0.2)
            readers = await reading(channel, 3)
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C reaches every process of a terminal's group
            await asyncio.wait_for(asyncio.gather(*(reader.read_on() for reader in readers)), HANG_S)
        assert await asyncio.wait_for(process.wait(), HANG_S) == 0


async def is_serving(health: Any) -> bool:
    try:
        answer = await health.Check(health_pb2.HealthCheckRequest())
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
