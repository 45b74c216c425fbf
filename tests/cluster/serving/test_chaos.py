"""A whole server over two replicas of two ranks, in processes of its own, under load: nothing is lost, changed or left.

``python -m support.chaos`` and ``python -m support.chaos.leaks`` do more of it. The tests share one server and take it
through its life, so they run in the order in which they stand.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from support.chaos.calls import CUT, REFUSED, WHOLE, Callers
from support.chaos.family import answers_alone, requests
from support.chaos.faults import Fault, runs, strike
from support.chaos.leaks import leaks_of
from support.chaos.server_process import START_S, FamilyServer
from support.chaos.streams import Streams
from support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

STREAMS = 20
MAX_TOKENS = 64


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FamilyServer]:
    log: Path = tmp_path_factory.mktemp("chaos") / "server.log"
    running = await FamilyServer.start(log)
    try:
        yield running
    finally:
        await running.kill()
        print(log.read_text())


async def test_requests_that_end_in_every_way_leave_nothing(server: FamilyServer) -> None:
    endings, _, after, grown = await leaks_of(server, 100, max_tokens=16)
    assert endings.unexpected == []
    assert sum(endings.ended.values()) == 100
    assert min(endings.ended.values()) > 5, endings.ended
    assert len(after.by_process) == 5
    assert grown == []


async def test_no_request_is_lost_or_changed(server: FamilyServer) -> None:
    """A slow machine may take a live gang for a hung one, which is one rebuild more and changes nothing here."""
    asked = requests(STREAMS, MAX_TOKENS)
    streams = Streams(server.address, asked, answers_alone(asked))
    try:
        for replica, fault in enumerate([Fault(signal.SIGKILL, (0, 1)), Fault(signal.SIGSTOP, (1,))]):
            outcome = await strike(server, streams, fault, replica)
            assert outcome.num_live >= STREAMS // 2
        await streams.end(START_S)
    finally:
        await streams.cancel()
    assert streams.wrong == []
    assert streams.num_whole >= STREAMS


async def test_a_drain_under_load_cuts_nobody(server: FamilyServer) -> None:
    """Calls that have begun end whole, even when a gang dies meanwhile; later ones are refused."""
    callers = Callers(server.address, requests(STREAMS, MAX_TOKENS))
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
