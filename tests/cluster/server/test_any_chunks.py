"""Thoughts, answers and calls in all scripts, over gRPC: each of several answers adds up to the unary one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray.client import answers_of
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.calls import arguments, call_ids, thought_ids
from support.cluster.fake_gang import FakeGang, Script, gang_info
from support.cluster.serving import Serving, joined, serving
from support.cluster.text import byte_ids
from support.hypothesis_settings import FIXTURE_SERVES_ALL

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESPONSE = 50
said = st.text(alphabet="ab {<|\né漢가नि\u0301\u200d👩👧🇨🇿\ufe0f\ufffd", max_size=5)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Serving]:
    async with serving(tokenizer, FakeGang(gang_info=gang_info(max_model_len=1024))) as running:
        yield running


def answer_of(messages: list[pb.GenerateStreamResponse], index: int) -> pb.GenerateResponse:
    """One answer of a stream of several, as a stream of its own would have told it."""
    deltas, end = [], pb.Completion()
    for message in messages:
        if message.HasField("answer_end") and message.answer_end.index == index:
            end = message.answer_end.completion
        if message.HasField("delta") and message.delta.index == index:
            deltas.append(pb.GenerateStreamResponse(delta=message.delta))
    return joined([*deltas, pb.GenerateStreamResponse(final=end)])


@settings(max_examples=40, suppress_health_check=FIXTURE_SERVES_ALL)
@given(
    thought=said,
    text=said,
    by_bytes=st.booleans(),
    calls=st.lists(st.tuples(st.sampled_from(["f", "g"]), arguments), max_size=2),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    max_tokens=st.integers(0, 90),
    stop=st.lists(st.text(alphabet="ab{漢👩\u200d\u0301", min_size=1, max_size=2), max_size=2),
    n=st.integers(1, 3),
    shown=st.tuples(st.booleans(), st.booleans()),
    echo=st.booleans(),
)
async def test_a_stream_adds_up_to_the_unary_answer(
    served: Serving,
    tokenizer: ChatTokenizer,
    thought: str,
    text: str,
    by_bytes: bool,
    calls: list[tuple[str, dict[str, Any]]],
    sizes: list[int],
    max_tokens: int,
    stop: list[str],
    n: int,
    shown: tuple[bool, bool],
    echo: bool,
) -> None:
    ids = thought_ids(tokenizer, thought)
    num_thought = len(ids)
    ids += byte_ids(tokenizer, text.encode()) if by_bytes else tokenizer.encode(text)[1:] if text else []
    for name, value in calls:
        ids += call_ids(tokenizer, name, value)
    shows_special, shows_stop = shown
    sampling = pb.SamplingParameters(
        max_tokens=max_tokens,
        stop=stop,
        seed=1,
        n=n,
        logprobs=0,
        logprob_text=True,
        echo=echo,
        skip_special_tokens=not shows_special,
        include_stop_str_in_output=shows_stop,
    )
    body: dict[str, Any] = {"request_id": "r", "text": "Hi 👩", "sampling": sampling}
    served.gang.script = Script([*ids, RESPONSE])
    unary = await served.stub.Generate(pb.GenerateRequest(**body))
    served.gang.script = Script([*ids, RESPONSE], group_sizes=tuple(sizes))
    messages = await served.stream(pb.GenerateStreamRequest(**body))
    if n == 1:
        assert joined(messages) == unary
    assert messages[-1].final == unary.completion
    echoed = ("<bos>Hi 👩" if shows_special else "Hi 👩") if echo else ""
    for index, answer in enumerate(answers_of(unary)):
        given = len(answer.token_ids)
        assert list(answer.token_ids) == [*ids, RESPONSE][:given]
        assert len(answer.logprobs) == given
        assert answer.text.startswith(echoed)
        if n > 1:
            whole = answer_of(messages, index)
            assert (whole.text, whole.reasoning, whole.token_ids) == (answer.text, answer.reasoning, answer.token_ids)
            assert whole.logprobs == answer.logprobs
            assert [_unnamed(call) for call in whole.tool_calls] == [_unnamed(call) for call in answer.tool_calls]
            assert whole.completion.usage.completion_tokens == given
            assert whole.completion.usage.reasoning_tokens == min(num_thought, given)
        reason = answer.completion.finish_reason
        if reason in (pb.FINISH_REASON_STOP_TOKEN, pb.FINISH_REASON_TOOL_CALL) and not shows_special:
            assert answer.reasoning == thought
            assert answer.text == echoed + text
            assert [(call.name, json.loads(call.arguments_json)) for call in answer.tool_calls] == calls
    usage, given = unary.completion.usage, len(unary.token_ids)
    assert usage.completion_tokens == n * given, "the answers are alike here"
    assert usage.reasoning_tokens == n * min(num_thought, given)
    assert usage.prompt_tokens == len(tokenizer.encode("Hi 👩"))
    ids_of_calls = [call.id for answer in answers_of(unary) for call in answer.tool_calls]
    assert len(set(ids_of_calls)) == len(ids_of_calls)


def _unnamed(call: pb.ToolCall) -> tuple[str, str, str, bool]:
    return call.id, call.name, call.arguments_json, call.is_incomplete
