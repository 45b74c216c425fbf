"""Calls that cannot be: of a closed client, with a dict, with a deadline beyond numbers, behind ids without a seed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gemray.client import AsyncClient, Client, ClientClosed, InvalidOption, RequestRefused, Retry
from gemray.client.retry import Continuation, seeded
from gemray.client.sync import LONGEST_TIMEOUT_S, checked_timeout
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.serving import serving

HI = pb.GenerateRequest(text="Hi")
HI_STREAM = pb.GenerateStreamRequest(text="Hi")
ONCE = Retry(first_s=0, resume_s=0)


def test_a_closed_client_says_so() -> None:
    client = Client("127.0.0.1:1")
    client.close()
    client.close()
    for call in (
        lambda: client.generate(HI),
        lambda: list(client.stream(HI_STREAM)),
        client.model_info,
        client.is_serving,
    ):
        with pytest.raises(ClientClosed, match=r"^127\.0\.0\.1:1: the client is closed$"):
            call()


async def test_a_closed_client_of_a_loop_says_so() -> None:
    client = AsyncClient("127.0.0.1:1")
    await client.close()
    await client.close()
    with pytest.raises(ClientClosed):
        await client.generate(HI)
    with pytest.raises(ClientClosed):
        _ = [message async for message in client.stream(HI_STREAM)]
    with pytest.raises(ClientClosed):
        await client.is_serving()


def test_a_request_of_another_kind_is_named() -> None:
    wrong: Any = {"text": "Hi"}
    with Client("127.0.0.1:1", retry=ONCE) as client:
        for call, kind in (
            (client.generate, "GenerateRequest"),
            (client.stream, "GenerateStreamRequest"),
            (client.tokenize, "TokenizeRequest"),
            (client.detokenize, "DetokenizeRequest"),
        ):
            with pytest.raises(InvalidOption, match=rf"^request = 'dict' is not allowed: .*\.{kind},"):
                call(wrong)
        with pytest.raises(InvalidOption, match="GenerateRequest"):
            client.generate(HI_STREAM)  # type: ignore[arg-type]


def test_a_deadline_beyond_any_is_none() -> None:
    assert checked_timeout(1e12) is None
    assert checked_timeout(LONGEST_TIMEOUT_S) == LONGEST_TIMEOUT_S
    with pytest.raises(InvalidOption):
        checked_timeout(float("inf"))


@pytest.mark.parametrize("field", ["emitted_token_ids", "emitted_by_answer"])
def test_no_seed_is_drawn_behind_emitted_ids(field: str) -> None:
    emitted: Any = {field: [5] if field == "emitted_token_ids" else [pb.TokenIds(ids=[5])]}
    assert not seeded(pb.GenerateRequest(text="Hi", **emitted)).sampling.HasField("seed")
    continuation = Continuation(pb.GenerateStreamRequest(text="Hi", **emitted))
    assert not continuation.request().sampling.HasField("seed")
    assert seeded(HI).sampling.HasField("seed")


async def test_the_server_refuses_emitted_ids_without_a_seed(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang(Script([107] * 2))) as served:
        with Client(served.server.address, retry=ONCE) as client:
            request = pb.GenerateRequest(text="Hi", emitted_token_ids=[5], sampling=pb.SamplingParameters(max_tokens=4))
            with pytest.raises(RequestRefused) as caught:
                await asyncio.to_thread(client.generate, request, timeout_s=1e12)
    assert caught.value.field == "sampling.seed"
