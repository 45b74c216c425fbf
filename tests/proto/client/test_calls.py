"""What goes with a call and comes back beside its answer: metadata, health, the server's own words."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import pytest

from gemray.client import AsyncClient, Client, ClientError, Retry
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.gang.client import GangState
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.serving import serving
from support.waiting import HANG_S

HI = pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(max_tokens=2))
HI_STREAM = pb.GenerateStreamRequest(text="Hi", sampling=pb.SamplingParameters(max_tokens=2))
ONCE = Retry(first_s=0, resume_s=0)


async def test_metadata_goes_with_each_call(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    let_in = (("authorization", "Bearer secret"),)
    async with (
        serving(tokenizer, FakeGang(Script([107] * 2)), auth_token_file=str(tmp_path / "tokens")) as served,
        AsyncClient(served.server.address, retry=ONCE) as client,
    ):
        with pytest.raises(ClientError) as caught:
            await client.generate(HI)
        assert caught.value.details == "this server asks for 'authorization: Bearer TOKEN'"
        assert (await client.generate(HI, metadata=let_in)).text == "\n\n"
        assert [m.delta.text async for m in client.stream(HI_STREAM, metadata=let_in) if m.delta.text] == ["\n", "\n"]
        assert (await client.model_info(metadata=let_in)).dtype == "float32"
        assert (await client.server_stats(metadata=let_in)).requests.completed == 2
        assert (await client.tokenize(pb.TokenizeRequest(text="Hi"), metadata=let_in)).token_ids
        assert (await client.detokenize(pb.DetokenizeRequest(token_ids=[107]), metadata=let_in)).text == "\n"


async def test_health_is_told_to_everybody(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    gang = FakeGang(state=GangState.STARTING)
    async with (
        serving(tokenizer, gang, auth_token_file=str(tmp_path / "tokens")) as served,
        AsyncClient(served.server.address, retry=ONCE) as client,
    ):
        assert not await client.is_serving(timeout_s=HANG_S)
        with Client(served.server.address) as blocking:
            assert not await asyncio.to_thread(blocking.is_serving, timeout_s=HANG_S)
    async with serving(tokenizer, FakeGang()) as served, AsyncClient(served.server.address) as client:
        assert await client.is_serving(timeout_s=HANG_S)
        with Client(served.server.address) as blocking:
            assert await asyncio.to_thread(blocking.is_serving, timeout_s=HANG_S)
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ClientError):
            await client.is_serving(timeout_s=HANG_S)
    with Client("127.0.0.1:1") as blocking, pytest.raises(ClientError):
        blocking.is_serving(timeout_s=HANG_S)


async def test_clients_of_threads_have_metadata_too(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang(Script([107] * 2))) as served:
        with Client(served.server.address) as client:
            told = await asyncio.to_thread(client.generate, HI, metadata=(("x-trace", "1"),))
            assert told.text == "\n\n"
            stream = client.stream(HI_STREAM, metadata=(("x-trace", "1"),))
            assert "".join(await asyncio.to_thread(lambda: [m.delta.text for m in stream])) == "\n\n"


def test_the_two_clients_have_the_same_calls() -> None:
    def calls_of(client: type) -> dict[str, inspect.Signature]:
        public = {name: call for name, call in vars(client).items() if not name.startswith("_")}
        # What comes back differs where it is an answer that grows.
        return {name: inspect.signature(call).replace(return_annotation=None) for name, call in public.items()}

    assert calls_of(AsyncClient) == calls_of(Client)
    assert len(calls_of(Client)) >= 8
