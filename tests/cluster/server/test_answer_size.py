"""Answers fit what clients take: streams send log-probabilities in parts, and what cannot fit is refused up front."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc
from gemray_cluster.server.answer_size import DEFAULT_CLIENT_BYTES, STREAM_MESSAGE_BYTES
from gemray_cluster.server.limits import MAX_TOKENIZE_BYTES
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.fake_gang import FakeGang, Script, gang_info
from support.cluster.serving import bad_request_of, serving
from support.cluster.text import MULTILINGUAL, byte_ids

LIMIT = 1 << 16
"""The smallest that a server takes; 210 positions of 20 fill it."""
TOP_20 = pb.SamplingParameters(max_tokens=3, prompt_logprobs=20, logprobs=20)


def ids(count: int) -> pb.TokenIds:
    return pb.TokenIds(ids=[2000 - i % 700 for i in range(count)])


@pytest.mark.parametrize("prompt_chunk", [None, 512])
async def test_a_stream_of_any_prompt_fits_its_messages(tokenizer: ChatTokenizer, prompt_chunk: int | None) -> None:
    """7,000 positions of 20: 2.2 MB, 33 times what a message may hold."""
    gang = FakeGang(Script(prompt_chunk=prompt_chunk), gang_info(max_model_len=8192))
    async with serving(tokenizer, gang, max_message_bytes=LIMIT) as served:
        messages = await served.stream(pb.GenerateStreamRequest(token_ids=ids(7000), sampling=TOP_20))
    assert max(message.ByteSize() for message in messages) <= LIMIT
    entries = [entry for message in messages for entry in message.delta.prompt_logprobs]
    assert [entry.token_id for entry in entries] == list(ids(7000).ids[1:])
    assert {len(entry.top) for entry in entries} == {20}
    with_tokens = [i for i, message in enumerate(messages) if message.delta.token_ids]
    of_prompt = [i for i, message in enumerate(messages) if message.delta.prompt_logprobs]
    assert max(of_prompt) <= min(with_tokens), "the prompt's come first"
    assert messages[-1].final.usage.completion_tokens == 3


async def test_messages_of_a_stream_fit_clients_that_set_no_limit(tokenizer: ChatTokenizer) -> None:
    """gRPC takes 4 MiB by default; 20,000 positions of 20 are 6 MB."""
    async with serving(tokenizer, FakeGang(gang_info=gang_info(max_model_len=32_768))) as served:
        messages = await served.stream(pb.GenerateStreamRequest(token_ids=ids(20_000), sampling=TOP_20))
    assert max(message.ByteSize() for message in messages) < 2 * STREAM_MESSAGE_BYTES
    assert sum(len(message.delta.prompt_logprobs) for message in messages) == 19_999


async def test_what_no_answer_carries_is_refused_before_any_work(tokenizer: ChatTokenizer) -> None:
    gang = FakeGang(gang_info=gang_info(max_model_len=8192))
    async with serving(tokenizer, gang, max_message_bytes=LIMIT) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Generate(pb.GenerateRequest(token_ids=ids(7000), sampling=TOP_20))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        field, words = bad_request_of(caught.value)
        assert field == "sampling.prompt_logprobs"
        assert "20 for a prompt of 7000 tokens" in (caught.value.details() or "") + words
        assert "max_message_bytes = 65536" in words
        assert "GenerateStream" in words
        assert gang.submitted == []
        # What fits is answered, up to the bound, and what is longer with fewer top tokens, too.
        for count, top in ((200, 20), (3000, 0)):
            sampling = pb.SamplingParameters(max_tokens=1, prompt_logprobs=top)
            answer = await served.stub.Generate(pb.GenerateRequest(token_ids=ids(count), sampling=sampling))
            assert len(answer.prompt_logprobs) == count - 1


async def test_an_answer_that_grows_too_large_ends_at_once(tokenizer: ChatTokenizer) -> None:
    """An output's length is not known before; 210 tokens with 20 log-probabilities each fill the message, and the call
    ends without waiting for 3,000."""
    gang = FakeGang(Script(delay_s=0.0), gang_info(max_model_len=8192))
    async with serving(tokenizer, gang, max_message_bytes=LIMIT) as served:
        sampling = pb.SamplingParameters(max_tokens=3000, logprobs=20, ignore_eos=True)
        with pytest.raises(grpc.aio.AioRpcError, match="max_message_bytes = 65536") as caught:
            await served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=sampling))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(gang.cancelled) == 1, "the engine is told to stop"
        assert served.server.limiter.failed == 1


async def test_tokenizing_and_its_opposite_fit_clients_that_set_no_limit(tokenizer: ChatTokenizer) -> None:
    longest = max(range(tokenizer.vocab_size), key=lambda token_id: len(tokenizer.bytes_of(token_id)))
    num_ids = DEFAULT_CLIENT_BYTES // len(tokenizer.bytes_of(longest))
    (first, *_) = byte_ids(tokenizer, "é".encode())
    broken = [longest] * (num_ids - num_ids // 10) + [first] * 300_000  # three bytes each, once they are U+FFFD
    async with serving(tokenizer, FakeGang()) as served, grpc.aio.insecure_channel(served.server.address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        tokenized = await stub.Tokenize(pb.TokenizeRequest(text="~" * MAX_TOKENIZE_BYTES))
        assert len(tokenized.token_ids) <= MAX_TOKENIZE_BYTES + 1
        text = (await stub.Detokenize(pb.DetokenizeRequest(token_ids=[longest] * num_ids))).text
        assert DEFAULT_CLIENT_BYTES - len(tokenizer.bytes_of(longest)) < len(text.encode()) <= DEFAULT_CLIENT_BYTES
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * (MAX_TOKENIZE_BYTES - 20))])
        too_much = [
            (stub.Tokenize, pb.TokenizeRequest(text="x" * (MAX_TOKENIZE_BYTES + 1)), "text", "at most 983040 bytes"),
            (stub.Tokenize, pb.TokenizeRequest(chat=chat), "chat", "at most 983040 bytes, as its template writes it"),
            (stub.Detokenize, pb.DetokenizeRequest(token_ids=[longest] * (num_ids + 1)), "token_ids", "4000000 bytes"),
            (stub.Detokenize, pb.DetokenizeRequest(token_ids=broken), "token_ids", "4000000 bytes"),
        ]
        for call, request, field, words in too_much:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert bad_request_of(caught.value)[0] == field
            assert words in bad_request_of(caught.value)[1]


async def test_a_server_of_small_messages_says_so(tokenizer: ChatTokenizer) -> None:
    longest = max(range(tokenizer.vocab_size), key=lambda token_id: len(tokenizer.bytes_of(token_id)))
    async with serving(tokenizer, FakeGang(), max_message_bytes=LIMIT) as served:
        for call in (
            served.stub.Tokenize(pb.TokenizeRequest(text=MULTILINGUAL * (LIMIT // len(MULTILINGUAL.encode()) - 1))),
            served.stub.Detokenize(pb.DetokenizeRequest(token_ids=[longest] * 10_000)),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="max_message_bytes = 65536: ask for") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_lengths_are_refused_before_a_text_is_waited_for(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tokenizer, FakeGang()) as served:
        monkeypatch.setattr(served.server._service, "_text_work", None)  # nothing may get there
        long = "x" * (gang_info().model.max_model_len * tokenizer.longest_token + 1)
        many = pb.TokenIds(ids=[2] * 2_000_000)
        for call, request, field in (
            (served.stub.Generate, pb.GenerateRequest(token_ids=many), "token_ids"),
            (served.stub.Generate, pb.GenerateRequest(text=long), "text"),
            (served.stub.Generate, pb.GenerateRequest(), "input"),
            (served.stub.Tokenize, pb.TokenizeRequest(text="x" * (MAX_TOKENIZE_BYTES + 1)), "text"),
            (served.stub.Detokenize, pb.DetokenizeRequest(token_ids=many.ids), "token_ids"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request)
            assert bad_request_of(caught.value)[0] == field
