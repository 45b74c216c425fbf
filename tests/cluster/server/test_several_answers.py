"""Several answers to one prompt: each as a call of its own would have given it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import grpc
import msgspec
import pytest
import pytest_asyncio

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.messages import SequenceDelta, Submit
from support.cluster.fake_gang import FakeGang, Script, gang_info
from support.cluster.serving import Serving, bad_request_of, joined, serving
from support.waiting import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("fresh_gang")]

NUM_PLACES = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Serving]:
    async with serving(tokenizer, FakeGang(), max_live_requests=NUM_PLACES) as running:
        yield running


def set_prefix_cache(served: Serving, *, on: bool) -> None:
    info = gang_info()
    served.gang.gang_info = msgspec.structs.replace(info, model=msgspec.structs.replace(info.model, prefix_cache=on))


def answers_of(response: pb.GenerateResponse) -> list[pb.Answer]:
    """All answers of a unary response; the end of the first one is the call's."""
    first = pb.Answer.FromString(response.SerializeToString())  # the same numbers
    first.DiscardUnknownFields()
    return [first, *response.other_answers]


def split(messages: Sequence[pb.GenerateStreamResponse], n: int) -> list[pb.GenerateResponse]:
    """Each answer of a stream, as a stream of its own would have told it."""
    assert messages[-1].HasField("final")
    wholes = []
    for index in range(n):
        own = [m for m in messages if m.HasField("delta") and m.delta.index == index]
        (end,) = [m.answer_end for m in messages if m.HasField("answer_end") and m.answer_end.index == index]
        deltas = []
        for message in own:
            copy = pb.GenerateStreamResponse.FromString(message.SerializeToString())
            copy.delta.index = 0
            deltas.append(copy)
        request_id = messages[-1].request_id
        wholes.append(joined([*deltas, pb.GenerateStreamResponse(request_id=request_id, final=end.completion)]))
    return wholes


@pytest.mark.parametrize("sizes", [(1,), (3, 1, 2)])
@pytest.mark.parametrize("shares_prompt", [False, True])
async def test_each_answer_is_that_of_its_own_seed(
    served: Serving, sizes: tuple[int, ...], shares_prompt: bool
) -> None:
    served.gang.script = Script(group_sizes=sizes)
    set_prefix_cache(served, on=shares_prompt)
    seed, n = 2**64 - 2, 4
    sampling = pb.SamplingParameters(seed=seed, n=n, max_tokens=9, logprobs=1, prompt_logprobs=1, stop=["e"])
    response = await served.stub.Generate(pb.GenerateRequest(request_id="same", text="Hello", sampling=sampling))
    streamed = await served.stream(pb.GenerateStreamRequest(request_id="same", text="Hello", sampling=sampling))
    by_index = split(streamed, n)
    sampling.ClearField("n")
    for index, answer in enumerate(answers_of(response)):
        sampling.seed = (seed + index) % 2**64
        alone = await served.stub.Generate(pb.GenerateRequest(request_id="same", text="Hello", sampling=sampling))
        assert list(answer.token_ids) == list(alone.token_ids) == list(by_index[index].token_ids)
        assert answer.text == alone.text == by_index[index].text
        assert list(answer.logprobs) == list(alone.logprobs) == list(by_index[index].logprobs)
        assert answer.completion.seed == sampling.seed == by_index[index].completion.seed
        assert by_index[index].completion == alone.completion
        if index:
            assert answer.completion == alone.completion
            assert not by_index[index].prompt_logprobs, "the prompt's are told once"
        else:
            assert list(response.prompt_logprobs) == list(alone.prompt_logprobs)
            assert list(by_index[0].prompt_logprobs) == list(alone.prompt_logprobs)
    usage = response.completion.usage
    assert usage.completion_tokens == sum(len(answer.token_ids) for answer in answers_of(response))
    assert usage.prompt_tokens == alone.completion.usage.prompt_tokens, "one prompt, however many answers"
    assert streamed[-1].final == response.completion
    assert served.server.limiter.active == 0


@pytest.mark.parametrize("shares_prompt", [False, True])
async def test_the_others_wait_for_the_prompt_where_it_can_be_found_again(
    served: Serving, monkeypatch: pytest.MonkeyPatch, shares_prompt: bool
) -> None:
    set_prefix_cache(served, on=shares_prompt)
    seen: list[tuple[str, int]] = []
    generate = served.gang.generate

    async def watched(submit: Submit) -> AsyncGenerator[SequenceDelta, None]:
        seen.append(("begins", submit.params.seed))
        async with aclosing(generate(submit)) as deltas:
            async for delta in deltas:
                seen.append(("goes on", submit.params.seed))
                yield delta

    monkeypatch.setattr(served.gang, "generate", watched)
    await served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(n=3, max_tokens=4, seed=1)))
    begins = [event for event in seen if event[0] == "begins"]
    assert begins == [("begins", 1), ("begins", 2), ("begins", 3)]
    if shares_prompt:
        assert seen[:2] == [("begins", 1), ("goes on", 1)]
    else:
        assert seen[:3] == begins


async def test_cancelling_ends_all(served: Serving) -> None:
    served.gang.script = Script(stalls_after=3)
    call = served.stub.GenerateStream(
        pb.GenerateStreamRequest(text="Hi", sampling=pb.SamplingParameters(n=5, max_tokens=200))
    )
    await call.read()
    assert served.server.limiter.active == 5
    call.cancel()
    await eventually(lambda: served.gang.num_active == served.server.limiter.active == 0)
    assert len(served.gang.cancelled) == len(served.gang.submitted)


async def test_a_failure_of_one_is_the_call_s(served: Serving) -> None:
    served.gang.script = Script(fault_after=2)
    sampling = pb.SamplingParameters(n=3)
    for call in (
        served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=sampling)),
        served.stream(pb.GenerateStreamRequest(text="Hi", sampling=sampling)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "of 3: the engine could not go on: the logits hold NaN" in (caught.value.details() or "")
    assert served.gang.num_active == served.server.limiter.active == 0


@pytest.mark.parametrize("n", [0, -1, NUM_PLACES + 1, 2**31 - 1])
async def test_a_number_that_cannot_be(served: Serving, n: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(n=n)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    field, why = bad_request_of(caught.value)
    assert field == "sampling.n"
    assert f"1..{NUM_PLACES}" in why


async def test_answers_take_places(served: Serving) -> None:
    with served.server.limiter.admit(NUM_PLACES - 2), pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(n=3)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 9, 13])
async def test_a_stream_that_broke_off_goes_on(served: Serving, cut: int) -> None:
    sampling = pb.SamplingParameters(n=3, seed=8, max_tokens=4)
    messages = await served.stream(pb.GenerateStreamRequest(request_id="same", text="Hi", sampling=sampling))
    kept = messages[:cut]
    emitted = [[t for m in kept if m.delta.index == i for t in m.delta.token_ids] for i in range(3)]
    again = pb.GenerateStreamRequest(request_id="same", text="Hi", sampling=sampling)
    again.emitted_by_answer.extend(pb.TokenIds(ids=ids) for ids in emitted)
    rests = split(await served.stream(again), 3)
    for ids, before, after in zip(emitted, split(messages, 3), rests, strict=True):
        assert [*ids, *after.token_ids] == list(before.token_ids)
        assert before.text.endswith(after.text)
        assert before.completion.finish_reason == after.completion.finish_reason
        assert before.completion.usage.completion_tokens == after.completion.usage.completion_tokens


async def test_what_belongs_to_one_answer_is_refused_for_several(served: Serving) -> None:
    several = pb.SamplingParameters(n=2, seed=1)
    one = pb.SamplingParameters(seed=1)
    ids = pb.TokenIds(ids=[180])
    requests = {
        "emitted_token_ids": pb.GenerateRequest(text="Hi", sampling=several, emitted_token_ids=[180]),
        "emitted_by_answer": pb.GenerateRequest(text="Hi", sampling=one, emitted_by_answer=[ids]),
        "sampling.seed": pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(n=2), emitted_by_answer=[ids]),
        "emitted_by_answer[1].ids": pb.GenerateRequest(
            text="Hi", sampling=several, emitted_by_answer=[ids, pb.TokenIds(ids=[2**31])]
        ),
    }
    requests |= {"emitted_by_answer ": pb.GenerateRequest(text="Hi", sampling=several, emitted_by_answer=[ids] * 3)}
    for field, request in requests.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Generate(request)
        assert bad_request_of(caught.value)[0] == field.strip()
