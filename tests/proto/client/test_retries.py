"""A call that the server cuts off goes on behind what it has given: its messages are those of one call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
import pytest_asyncio

from gemray.client import AsyncAnswer, AsyncClient, Cancelled, Client, Retry, ServerUnreachable, answers_of
from gemray.client.errors import ClientError, DeadlinePassed
from gemray.client.retry import Attempts, Continuation
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.brief_server import BriefGang
from support.cluster.fake_gang import Script
from support.cluster.serving import Serving, serving
from support.waiting import HANG_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

AT_ONCE = Retry(first_s=60, resume_s=60, delay_s=0.001, max_delay_s=0.001)
NEVER = Retry(first_s=0, resume_s=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Serving]:
    async with serving(tokenizer, BriefGang()) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server asks for a pause of a second, which these tests do not need."""
    delay_after = Attempts.delay_after

    def at_once(self: Attempts, error: ClientError) -> float:
        error.retry_after_s = None
        return delay_after(self, error)

    monkeypatch.setattr(Attempts, "delay_after", at_once)


def gang_of(served: Serving, deltas: int | Sequence[int], refused: set[int] | None = None, **script: Any) -> BriefGang:
    gang = served.gang
    assert isinstance(gang, BriefGang)
    gang.script = Script(**script)
    gang.deltas_of_calls = (deltas,) if isinstance(deltas, int) else deltas
    gang.refused, gang.num_calls = frozenset(refused or ()), 0
    gang.submitted.clear()
    return gang


REQUEST = pb.GenerateStreamRequest(
    request_id="same",
    text="Hello",
    sampling=pb.SamplingParameters(seed=7, max_tokens=9, logprobs=1, prompt_logprobs=1, stop=["no such text"]),
)


def joined(messages: list[pb.GenerateStreamResponse]) -> pb.GenerateResponse:
    assert [message.WhichOneof("event") for message in messages] == ["delta"] * (len(messages) - 1) + ["final"]
    whole = pb.GenerateResponse(completion=messages[-1].final)
    for message in messages[:-1]:
        whole.token_ids.extend(message.delta.token_ids)
        whole.text += message.delta.text
        whole.logprobs.extend(message.delta.logprobs)
        whole.prompt_logprobs.extend(message.delta.prompt_logprobs)
    return whole


@pytest.mark.parametrize("refused", [set(), {0}, {1, 2}])
async def test_a_stream_goes_on(served: Serving, refused: set[int]) -> None:
    gang_of(served, 99)
    expected = joined(await served.stream(REQUEST))
    gang = gang_of(served, 2, refused)
    async with AsyncClient(served.server.address, retry=AT_ONCE) as client:
        whole = joined([message async for message in client.stream(REQUEST)])
    assert whole == expected
    emitted = [list(submit.emitted_ids) for submit in gang.submitted]
    assert len(emitted) > 3
    assert all(ids == list(expected.token_ids[: len(ids)]) for ids in emitted), "each goes on where the last one ended"
    assert emitted[-1], emitted
    assert not REQUEST.emitted_token_ids, "the caller's request stays as it was"


async def test_a_stream_goes_on_in_a_thread(served: Serving) -> None:
    gang_of(served, 99)
    expected = joined(await served.stream(REQUEST))
    gang_of(served, 3, {0, 2})

    def ask() -> list[pb.GenerateStreamResponse]:
        with Client(served.server.address, retry=AT_ONCE) as client:
            return list(client.stream(REQUEST))

    assert joined(await asyncio.to_thread(ask)) == expected


def by_answer(messages: list[pb.GenerateStreamResponse], n: int) -> list[pb.GenerateResponse]:
    """What a client makes of several answers: each one's deltas and its end, told once."""
    wholes = []
    for index in range(n):
        own = [m for m in messages if m.HasField("delta") and m.delta.index == index]
        (end,) = [m.answer_end for m in messages if m.HasField("answer_end") and m.answer_end.index == index]
        wholes.append(joined([*own, pb.GenerateStreamResponse(final=end.completion)]))
    return wholes


@pytest.mark.parametrize("in_thread", [False, True])
async def test_several_answers_go_on(served: Serving, in_thread: bool) -> None:
    request = pb.GenerateStreamRequest.FromString(REQUEST.SerializeToString())
    request.sampling.n = 3
    gang_of(served, 99)
    expected = by_answer(await served.stream(request), 3)
    gang = gang_of(served, (4, 4, 1, 9, 2))

    def ask() -> list[pb.GenerateStreamResponse]:
        with Client(served.server.address, retry=AT_ONCE) as client:
            return list(client.stream(request))

    if in_thread:
        messages = await asyncio.to_thread(ask)
    else:
        async with AsyncClient(served.server.address, retry=AT_ONCE) as client:
            messages = [message async for message in client.stream(request)]
    assert gang.num_calls > 3, "it was cut off"
    for whole, full in zip(by_answer(messages, 3), expected, strict=True):
        assert whole.token_ids == full.token_ids
        assert whole.text == full.text
        assert whole.logprobs == full.logprobs
        assert whole.prompt_logprobs == full.prompt_logprobs
        assert whole.completion.finish_reason == full.completion.finish_reason
        assert whole.completion.usage.completion_tokens == full.completion.usage.completion_tokens
    assert messages[-1].final.usage.completion_tokens == sum(len(full.token_ids) for full in expected)


async def test_all_answers_of_a_response(served: Serving) -> None:
    gang_of(served, 99)
    sampling = pb.SamplingParameters(seed=7, max_tokens=5, n=3)
    async with AsyncClient(served.server.address, retry=AT_ONCE) as client:
        response = await client.generate(pb.GenerateRequest(text="Hello", sampling=sampling))
        alone = await client.generate(
            pb.GenerateRequest(text="Hello", sampling=pb.SamplingParameters(seed=9, max_tokens=5))
        )
    answers = answers_of(response)
    assert [answer.completion.seed for answer in answers] == [7, 8, 9]
    assert answers[0].text == response.text
    assert answers[2].token_ids == alone.token_ids
    assert answers_of(alone) == [answers_of(alone)[0]]


async def test_what_was_told_of_the_prompt_is_not_told_twice(served: Serving) -> None:
    """The first call is cut off between the prompt's chunks, before it has given a token."""
    gang_of(served, 99)
    expected = joined(await served.stream(REQUEST))
    gang = gang_of(served, (1, 99), prompt_chunk=1)
    async with AsyncClient(served.server.address, retry=AT_ONCE) as client:
        whole = joined([message async for message in client.stream(REQUEST)])
    assert whole == expected
    assert [submit.emitted_ids for submit in gang.submitted] == [[], []]


async def test_every_try_has_the_same_seed(served: Serving) -> None:
    gang = gang_of(served, 2)
    request = pb.GenerateStreamRequest(text="Hello", sampling=pb.SamplingParameters(max_tokens=7))
    async with AsyncClient(served.server.address, retry=AT_ONCE) as client:
        messages = [message async for message in client.stream(request)]
    assert {submit.params.seed for submit in gang.submitted} == {messages[-1].final.seed}
    assert len(gang.submitted) > 2


async def test_a_unary_answer_begins_again(served: Serving) -> None:
    gang = gang_of(served, 99, {0, 1})
    async with AsyncClient(served.server.address, retry=AT_ONCE) as client:
        answer = await client.generate(pb.GenerateRequest(text="Hello", sampling=pb.SamplingParameters(max_tokens=3)))
    assert len(answer.token_ids) == 3
    assert gang.num_calls == 3


async def rest_of(answer: AsyncAnswer) -> list[pb.GenerateStreamResponse]:
    return [message async for message in answer]


async def test_patience_ends(served: Serving) -> None:
    gang = gang_of(served, 2)
    async with AsyncClient(served.server.address, retry=NEVER) as client:
        answer = client.stream(REQUEST)
        with pytest.raises(ServerUnreachable, match="UNAVAILABLE: rank 1 died") as caught:
            await rest_of(answer)
        assert await rest_of(answer) == [], "it is over"
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert gang.num_calls == 1


@pytest.mark.parametrize("in_thread", [False, True])
async def test_cancelling_stops_the_generation(served: Serving, in_thread: bool) -> None:
    gang = gang_of(served, 99)
    gang.script = Script(stalls_after=3)
    request = pb.GenerateStreamRequest(text="Hello", sampling=pb.SamplingParameters(max_tokens=200))
    gang.cancelled.clear()
    if in_thread:

        def ask() -> None:
            with Client(served.server.address, retry=AT_ONCE) as client:
                answer = client.stream(request)
                next(answer)
                answer.cancel()
                with pytest.raises(Cancelled):
                    list(answer)

        await asyncio.to_thread(ask)
    else:
        async with AsyncClient(served.server.address, retry=AT_ONCE) as client:
            answer = client.stream(request)
            await anext(answer)
            answer.cancel()
            with pytest.raises(Cancelled):
                await anext(answer)
    await eventually(lambda: len(gang.cancelled) == 1)
    assert gang.num_calls == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_that_takes_too_long_is_stopped(served: Serving, streams: bool) -> None:
    gang = gang_of(served, 999, token_ids=[107] * 200, stalls_after=3)
    sampling = pb.SamplingParameters(max_tokens=200)
    async with AsyncClient(served.server.address, retry=AT_ONCE) as client:

        async def ask() -> None:
            if streams:
                answer = client.stream(pb.GenerateStreamRequest(text="Hello", sampling=sampling), timeout_s=1)
                _ = [message async for message in answer]
            else:
                await client.generate(pb.GenerateRequest(text="Hello", sampling=sampling), timeout_s=1)

        with pytest.raises(DeadlinePassed, match="the call's time was over before its answer was whole"):
            await ask()
    await eventually(lambda: gang.num_active == 0 and served.server.limiter.active == 0, HANG_S)


async def test_an_echo_alone_is_given_once() -> None:
    """Without tokens nothing tells the server what has come: each try brings the echo."""
    sampling = pb.SamplingParameters(max_tokens=0, echo=True, n=2)
    continuation = Continuation(pb.GenerateStreamRequest(text="Hello", sampling=sampling))
    texts = ["", ""]
    for index in (0, 0, 1, 1):
        _ = continuation.request()
        told = continuation.take(pb.GenerateStreamResponse(delta=pb.Delta(text="Hello", index=index)))
        assert told is not None
        texts[index] += told.delta.text
    assert texts == ["Hello"] * 2


async def test_a_deadline_holds_for_all_tries(served: Serving) -> None:
    gang = gang_of(served, 99, set(range(1000)))
    patient = Retry(first_s=600, delay_s=0.01, max_delay_s=0.01)
    async with AsyncClient(served.server.address, retry=patient) as client:
        with pytest.raises(ServerUnreachable):
            await client.generate(pb.GenerateRequest(text="Hello"), timeout_s=0.5)
    assert gang.num_calls < 1000
