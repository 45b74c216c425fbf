"""A request that names its checkpoint is answered by that one or not at all."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import grpc
import pytest

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.gang.client import GangState
from gemray_workers.checkpoint.identity import CheckpointIdentity
from support.cluster.serving import Serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("fresh_gang")]


SHORT = pb.SamplingParameters(max_tokens=2)


def calls_of(served: Serving, **fields: Any) -> list[Any]:
    """The same request as both calls."""
    return [
        served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=SHORT, **fields)),
        served.stub.GenerateStream(pb.GenerateStreamRequest(text="Hi", sampling=SHORT, **fields)),
    ]


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with suppress(grpc.aio.AioRpcError):
        if isinstance(call, grpc.aio.UnaryStreamCall):
            _ = [message async for message in call]
    return await call.code(), await call.details()


async def test_the_one_that_is_served_answers_and_is_told(served: Serving) -> None:
    for call in calls_of(served, checkpoint_hash="0123") + calls_of(served):
        assert ("x-checkpoint-hash", "0123") in tuple(await call.initial_metadata())
        assert (await status_of(call))[0] is grpc.StatusCode.OK


@pytest.mark.parametrize("other", ["4567", ""])
async def test_another_one_does_not(served: Serving, other: str) -> None:
    for call in calls_of(served, checkpoint_hash=other):
        code, details = await status_of(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details.startswith(f"checkpoint_hash = {other!r} is not served here: '0123' is (org/fake)")
    assert not served.gang.submitted
    assert served.server.limiter.failed == 0


async def test_random_weights_are_no_checkpoint(served: Serving) -> None:
    served.gang.serve_instead(CheckpointIdentity(name="fake"))
    for call in calls_of(served, checkpoint_hash="0123"):
        code, details = await status_of(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "random weights" in details
        assert "x-checkpoint-hash" not in dict(await call.initial_metadata())


async def test_while_none_is_served_the_server_may_be_tried_again(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.gang, "state", GangState.STARTING)
    for call in calls_of(served, checkpoint_hash="4567"):
        assert (await status_of(call))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_long_one_is_a_mistake(served: Serving) -> None:
    for call in calls_of(served, checkpoint_hash="x" * 129):
        assert (await status_of(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
