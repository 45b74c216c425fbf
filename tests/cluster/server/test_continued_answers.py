"""An answer that was cut off goes on behind what its client has, whatever that was."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.calls import call_ids
from support.cluster.fake_gang import Script
from support.cluster.serving import Serving, bad_request_of
from support.cluster.text import MULTILINGUAL, byte_ids
from support.hypothesis_settings import FIXTURE_SERVES_ALL

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("fresh_gang")]


async def check_every_cut(served: Serving, request: pb.GenerateStreamRequest) -> None:
    """Cut a stream behind each of its deltas: the rest is what a call that knows them gives."""
    *deltas, last = await served.stream(request)
    for cut in range(len(deltas) + 1):
        kept, missed = deltas[:cut], deltas[cut:]
        again = pb.GenerateStreamRequest()
        again.CopyFrom(request)
        again.emitted_token_ids.extend(token_id for message in kept for token_id in message.delta.token_ids)
        *rest, end = await served.stream(again)
        assert _ids(rest) == _ids(missed)
        assert _text(rest) == _text(missed)
        assert _structure(rest) == _structure(missed)
        assert [m.delta.logprobs for m in rest] == [m.delta.logprobs for m in missed]
        if kept:
            assert not any(message.delta.prompt_logprobs for message in rest)
        if not (kept and not missed):  # the engine did nothing for it, and so found nothing cached
            assert end == last
        assert end.final.finish_reason == last.final.finish_reason
        assert end.final.usage.completion_tokens == last.final.usage.completion_tokens


def _ids(messages: list[pb.GenerateStreamResponse]) -> list[int]:
    return [token_id for message in messages for token_id in message.delta.token_ids]


def _text(messages: list[pb.GenerateStreamResponse]) -> str:
    return "".join(message.delta.text for message in messages)


def _structure(messages: list[pb.GenerateStreamResponse]) -> tuple[str, str]:
    """Thoughts, and what is said of calls."""
    calls = [call for message in messages for call in message.delta.tool_calls]
    said = [(call.index, call.id, call.name, call.arguments_json, call.is_complete) for call in calls]
    return "".join(message.delta.reasoning for message in messages), repr(said)


@settings(max_examples=15, suppress_health_check=FIXTURE_SERVES_ALL)
@given(
    seed=st.integers(0, 2**64 - 1),
    size=st.integers(1, 4),
    stop=st.lists(st.text(alphabet=" etaoin", min_size=1, max_size=2), max_size=2),
    max_tokens=st.integers(1, 16),
    min_tokens=st.integers(0, 1),
    logprobs=st.sampled_from([None, 2]),
)
async def test_any_cut_of_an_answer(
    served: Serving, seed: int, size: int, stop: list[str], max_tokens: int, min_tokens: int, logprobs: int | None
) -> None:
    served.gang.script = Script(group_sizes=(size,))
    sampling = pb.SamplingParameters(
        seed=seed,
        stop=stop,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs,
    )
    await check_every_cut(served, pb.GenerateStreamRequest(request_id="same", text="Hi", sampling=sampling))


async def test_cuts_inside_characters_thoughts_and_stop_strings(served: Serving, tokenizer: ChatTokenizer) -> None:
    thought = [100, *tokenizer.encode("hush")[1:], 101]
    text = byte_ids(tokenizer, (MULTILINGUAL[:12] + " ha ha tail").encode())
    for stop in ([], ["a ta"], ["never"]):
        served.gang.script = Script([*thought, *text, 106])
        sampling = pb.SamplingParameters(seed=1, stop=stop)
        await check_every_cut(served, pb.GenerateStreamRequest(request_id="same", text="Hi", sampling=sampling))


async def test_cuts_inside_calls(served: Serving, tokenizer: ChatTokenizer) -> None:
    ids = [*call_ids(tokenizer, "f", {"a": "b"}), *call_ids(tokenizer, "g", {"n": [1]}), 50]
    served.gang.script = Script(ids)
    request = pb.GenerateStreamRequest(request_id="same", text="Hi", sampling=pb.SamplingParameters(seed=1))
    await check_every_cut(served, request)
    body: dict[str, Any] = {"sampling": request.sampling, "text": "Hi", "emitted_token_ids": ids[:10]}
    rest = await served.stub.Generate(pb.GenerateRequest(request_id="same", **body))
    assert [(call.name, call.is_incomplete) for call in rest.tool_calls] == [("", False), ("g", False)]
    assert rest.tool_calls[1] == pb.ToolCall(id="same-1", name="g", arguments_json='{"n":[1]}')


async def test_the_rest_of_a_unary_answer(served: Serving) -> None:
    request = pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(seed=3, max_tokens=9))
    whole = await served.stub.Generate(request)
    request.emitted_token_ids.extend(whole.token_ids[:4])
    rest = await served.stub.Generate(request)
    assert list(rest.token_ids) == list(whole.token_ids[4:])
    assert whole.text.endswith(rest.text)
    assert rest.completion.usage.completion_tokens == 9
    assert served.gang.submitted[-1].emitted_ids == list(whole.token_ids[:4])


async def test_an_answer_that_had_ended_asks_nothing_of_the_gang(served: Serving) -> None:
    request = pb.GenerateStreamRequest(text="Hi", sampling=pb.SamplingParameters(seed=3, max_tokens=2))
    request.emitted_token_ids.extend([180, 106])
    (only,) = await served.stream(request)
    assert only.final.finish_reason == pb.FINISH_REASON_STOP_TOKEN
    assert only.final.stop_token_id == 106
    assert served.gang.submitted == []


@pytest.mark.parametrize(("min_tokens", "has_ended"), [(0, True), (1, True), (2, False)])
async def test_a_stop_token_before_min_tokens_has_ended_nothing(
    served: Serving, min_tokens: int, has_ended: bool
) -> None:
    sampling = pb.SamplingParameters(seed=3, max_tokens=9, min_tokens=min_tokens, stop_token_ids=[40])
    request = pb.GenerateRequest(text="Hi", sampling=sampling, emitted_token_ids=[41, 40])
    answer = await served.stub.Generate(request)
    assert (answer.completion.stop_token_id == 40, served.gang.submitted == []) == (has_ended, has_ended)
    request.emitted_token_ids.append(42)
    if not has_ended:
        assert (await served.stub.Generate(request)).completion.usage.completion_tokens > 3
        return
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await served.stub.Generate(request)
    assert bad_request_of(error.value)[0] == "emitted_token_ids[1]"


@pytest.mark.parametrize(
    ("sampling", "emitted", "field"),
    [
        ({}, [180], "sampling.seed"),
        ({"seed": 1, "max_tokens": 2}, [180] * 3, "emitted_token_ids"),
        ({"seed": 1}, [180] * 300, "emitted_token_ids"),  # more than the server fits
        ({"seed": 1}, [2048], "emitted_token_ids"),
    ],
)
async def test_what_no_call_can_have_given(
    served: Serving, sampling: dict[str, Any], emitted: list[int], field: str
) -> None:
    request = pb.GenerateStreamRequest(text="Hi", sampling=pb.SamplingParameters(**sampling), emitted_token_ids=emitted)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stream(request)
    assert bad_request_of(caught.value)[0] == field
    assert served.gang.submitted == []


@pytest.mark.parametrize("answers", [1, 2])
async def test_ids_behind_a_stop_token_are_refused(served: Serving, answers: int) -> None:
    """The engine would end such a request without a token, which nobody expects of it."""
    sampling = pb.SamplingParameters(seed=7, max_tokens=9, stop_token_ids=[40], n=answers)
    request = pb.GenerateRequest(text="Hi", sampling=sampling)
    given = request.emitted_token_ids if answers == 1 else request.emitted_by_answer.add().ids
    given.extend([41, 40, 42])
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await served.stub.Generate(request)
    field, description = bad_request_of(error.value)
    assert field == ("emitted_token_ids[1]" if answers == 1 else "emitted_by_answer[0].ids[1]")
    assert "a stop token as the last id alone" in description
    given.pop()
    assert (await served.stub.Generate(request)).completion.stop_token_id == 40
