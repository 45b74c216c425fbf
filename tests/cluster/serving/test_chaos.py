"""A whole server over two replicas of two ranks, in processes of its own, under load: nothing is lost, changed or left.

``python -m support.chaos`` and ``python -m support.chaos.leaks`` do the same for longer. The tests share one server and
take it through its life, so they run in the order in which they stand. What each fault cost is a property of its test.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from gemray.v1 import generation_pb2 as pb
from support.chaos.calls import CUT, REFUSED, WHOLE, Callers
from support.chaos.family import answers_alone, requests
from support.chaos.faults import Fault, kill_server, runs, strike
from support.chaos.leaks import leaks_of
from support.chaos.server_process import START_S, FamilyServer
from support.chaos.streams import Streams
from support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

STREAMS = 20
MAX_TOKENS = 64
HEARTBEAT_S = 15
"""Where the machine is so slow that a live gang is silent for that long, it is rebuilt once more, which changes nothing
here."""
FLAGS = (f"--heartbeat-s={HEARTBEAT_S}", "--paced")
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FAULTS: list[Mapping[int, Fault]] = [
    {0: Fault(KILL, (0,))},
    {1: Fault(KILL, (1,))},
    {0: Fault(KILL, (0, 1))},
    {1: Fault(STOP, (0,)), 0: Fault(STOP, (1,))},
    {1: Fault(STOP, (0, 1))},
]
"""What happens to which replicas at once: each rank and a whole gang, killed and stopped."""


@dataclass
class Life:
    """A server, and the one that is started in its place."""

    log: Path
    server: FamilyServer

    async def start_again(self) -> FamilyServer:
        port = self.server.address.rpartition(":")[2]
        return await FamilyServer.start(self.log, *FLAGS, f"--port={port}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def life(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Life]:
    log = tmp_path_factory.mktemp("chaos") / "server.log"
    life = Life(log, await FamilyServer.start(log, *FLAGS))
    try:
        yield life
    finally:
        await life.server.kill()
        print(log.read_text())


@pytest.fixture(scope="module")
def asked() -> list[pb.GenerateStreamRequest]:
    return requests(STREAMS, MAX_TOKENS)


@pytest.fixture(scope="module")
def expected(asked: list[pb.GenerateStreamRequest]) -> dict[str, list[int]]:
    return answers_alone(asked)


@pytest_asyncio.fixture(loop_scope="module")
async def streams(
    life: Life, asked: list[pb.GenerateStreamRequest], expected: dict[str, list[int]]
) -> AsyncIterator[Streams]:
    """Streams of clients with the retry of `gemray.client`; at the end all are whole, as if nothing had happened."""
    streams = Streams(life.server.address, asked, expected)
    try:
        yield streams
        await streams.end(START_S)
    finally:
        await streams.cancel()
    assert streams.wrong == []
    assert streams.num_whole >= STREAMS


async def test_requests_that_end_in_every_way_leave_nothing(life: Life) -> None:
    endings, _, after, grown = await leaks_of(life.server, 100, max_tokens=16)
    assert endings.unexpected == []
    assert sum(endings.ended.values()) == 100
    assert min(endings.ended.values()) > 5, endings.ended
    assert len(after.by_process) == 5
    assert grown == []


async def test_no_request_is_lost_or_changed(
    life: Life, streams: Streams, record_property: Callable[[str, object], None]
) -> None:
    for faults in FAULTS:
        outcome = await strike(life.server, streams, faults)
        record_property("fault", outcome.line)
        assert outcome.num_live >= STREAMS // 2
        assert streams.wrong == []
    told = life.log.read_text()
    for rank in (0, 1):
        assert re.search(rf"rank {rank} \(pid \d+ on \S+\) gives no answer: its process is stopped", told)


async def test_streams_go_on_with_the_next_server(
    life: Life, streams: Streams, record_property: Callable[[str, object], None]
) -> None:
    """The first hangs for a while and is killed, as by a liveness probe."""
    outcome, life.server = await kill_server(life.server, streams, life.start_again, stopped_s=2.0)
    record_property("fault", outcome.line)
    assert outcome.num_live >= STREAMS // 2


async def test_a_drain_under_load_cuts_nobody(life: Life, asked: list[pb.GenerateStreamRequest]) -> None:
    """Calls that have begun end whole, even when a gang dies meanwhile; later ones are refused."""
    server = life.server
    callers = Callers(server.address, asked)
    processes = [psutil.Process(server.pid), *server.descendants()]
    try:
        await eventually(lambda: callers.num_begun >= STREAMS // 2, START_S)
        os.kill(server.pid, signal.SIGTERM)
        await eventually(lambda: callers.ended[REFUSED] > 0, START_S)
        os.kill(server.replicas[0][1], signal.SIGKILL)
        await eventually(lambda: callers.num_begun == 0, START_S)
        await callers.end(START_S)
    finally:
        await callers.cancel()
    assert callers.cut == []
    assert callers.ended[WHOLE] >= STREAMS // 2
    assert callers.ended[CUT] == 0
    assert await server.process.wait() == 0
    await eventually(lambda: not any(map(runs, processes)), START_S)
