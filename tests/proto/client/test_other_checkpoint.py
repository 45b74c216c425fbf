"""A stream whose server is replaced by one of other weights ends, rather than going on with those."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc
import pytest
from typing_extensions import override

from gemray.client import AsyncClient, Client, RequestRefused, Retry
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.checkpoint.identity import CheckpointIdentity
from gemray_workers.messages import SequenceDelta, Submit
from support.cluster.brief_server import BriefGang
from support.cluster.serving import serving

AT_ONCE = Retry(first_s=60, resume_s=60, delay_s=0.001, max_delay_s=0.001)
REQUEST = pb.GenerateStreamRequest(text="Hello", sampling=pb.SamplingParameters(seed=7, max_tokens=9))


class ReplacedGang(BriefGang):
    """Ends each call after two tokens; from the second one on it has the weights of `next_hash`."""

    next_hash = "0123"

    @override
    async def generate(self, submit: Submit) -> AsyncGenerator[SequenceDelta, None]:
        try:
            async for delta in super().generate(submit):
                yield delta
        finally:
            self.serve_instead(CheckpointIdentity(name="org/fake", hash=self.next_hash))


@pytest.mark.parametrize("in_thread", [False, True])
async def test_other_weights_do_not_go_on(tokenizer: ChatTokenizer, in_thread: bool) -> None:
    gang = ReplacedGang()
    gang.next_hash = "4567"
    got: list[int] = []
    async with serving(tokenizer, gang) as served:

        def ask() -> None:
            with Client(served.server.address, retry=AT_ONCE) as client:
                for message in client.stream(REQUEST):
                    got.extend(message.delta.token_ids)

        async def ask_here() -> None:
            async with AsyncClient(served.server.address, retry=AT_ONCE) as client:
                async for message in client.stream(REQUEST):
                    got.extend(message.delta.token_ids)

        with pytest.raises(RequestRefused, match="checkpoint_hash = '0123' is not served here") as caught:
            await (asyncio.to_thread(ask) if in_thread else ask_here())
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert len(got) == 2, "what the first weights gave"
    assert len(gang.submitted) == 1


async def test_the_same_weights_do(tokenizer: ChatTokenizer) -> None:
    gang = ReplacedGang()
    async with serving(tokenizer, gang) as served, AsyncClient(served.server.address, retry=AT_ONCE) as client:
        got = [token_id async for message in client.stream(REQUEST) for token_id in message.delta.token_ids]
    assert len(got) == 9
    assert len(gang.submitted) > 1
    assert not REQUEST.HasField("checkpoint_hash"), "the caller's request stays as it was"
