"""Bad input of any kind ends with a status that says so: the sweep in small (`python -m support.fuzz` in large)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random

import pytest

from gemray.v1 import generation_pb2 as pb
from support.cluster.serving import Serving
from support.fuzz.corpus import corpus
from support.fuzz.frames import GOAWAY, PING, PINGS, SESSIONS, damaged_session, kinds_of_frames, send
from support.fuzz.handlers import Handlers, RecordingContext, Tally, sweep
from support.waiting import HANG_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def handlers() -> Iterator[Handlers]:
    made = Handlers()
    yield made
    made.close()


async def test_the_corpus_is_right(handlers: Handlers) -> None:
    """Mutations begin from requests that reach the gang."""
    for method, request in corpus():
        context, _ = await handlers.call(method, request.SerializeToString())
        assert context.code == "OK", (method, request, context.details)


async def test_changed_requests(handlers: Handlers) -> None:
    tally = await sweep(handlers, seed=12345, count=400)
    assert tally.faults == []
    assert tally.ended["Generate", "OK"] > 10
    assert tally.ended["Generate", "INVALID_ARGUMENT"] > 10
    assert len(tally.fields) > 10


async def test_the_sweep_finds_faults(handlers: Handlers, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr("gemray_cluster.server.requests.check_limits", broken)
    tally = Tally()
    await handlers.judge("Generate", pb.GenerateRequest(text="Hi").SerializeToString(), tally)
    assert tally.ended["Generate", "INTERNAL"] == 1
    assert "KeyError" in tally.faults[0]
    assert RecordingContext().code == "OK"


async def still_serves(served: Serving) -> None:
    assert (await served.stub.Generate(pb.GenerateRequest(text="Hi"), timeout=HANG_S)).token_ids
    await eventually(lambda: served.server.limiter.active == 0)


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_frames_that_should_not_be(served: Serving, hangs_up: bool) -> None:
    address = served.server.address
    await asyncio.gather(*(send(address, data, hangs_up=hangs_up) for data in SESSIONS.values()))
    await still_serves(served)


async def test_damaged_frames(served: Serving) -> None:
    random = Random(7)
    for _ in range(4):
        await asyncio.gather(*(send(served.server.address, damaged_session(random)) for _ in range(25)))
        await still_serves(served)


async def test_a_client_that_pings_often_is_answered_and_kept(served: Serving) -> None:
    """As the keepalive options promise: no strikes."""

    def is_answered(answer: bytes) -> bool:
        return kinds_of_frames(answer).count(PING) >= 200

    kinds = kinds_of_frames(await send(served.server.address, PINGS, silence_s=HANG_S, enough=is_answered))
    assert kinds.count(PING) == 200
    assert GOAWAY not in kinds
