"""OpenAI's own client against the gateway: answers, streams, tools, log-probabilities, errors, cancelling."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pydantic
import pytest
import pytest_asyncio

from gemray_cluster.text.tokenizer import SPECIAL_TOKENS, ChatTokenizer
from gemray_workers.embedded import embedded_path
from support.cluster.calls import call_ids, thought_ids
from support.cluster.deadlines import until_taken
from support.cluster.fake_gang import FakeGang, Script, gang_info
from support.cluster.http_gateway import HttpGateway, gateway
from support.cluster.serving import Serving, serving
from support.cluster.text import byte_ids
from support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "org/fake"
ASKED: Any = [{"role": "user", "content": "Weather?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
TURN_ENDS, RESPONSE = SPECIAL_TOKENS["<turn|>"], SPECIAL_TOKENS["<|tool_response>"]


@pytest.fixture(scope="module")
def embedded() -> ChatTokenizer:
    """A tokenizer whose template writes calls and their answers."""
    return ChatTokenizer.from_directory(embedded_path("gemray-tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(embedded: ChatTokenizer) -> AsyncIterator[Serving]:
    gang = FakeGang(gang_info=gang_info(max_model_len=1024, vocab_size=embedded.vocab_size, num_draft_tokens=4))
    async with serving(embedded, gang) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(served: Serving) -> AsyncIterator[HttpGateway]:
    async with gateway(served.server.address) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(http: HttpGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with http.client() as made:
        yield made


def says(served: Serving, ids: list[int], **script: Any) -> None:
    served.gang.script = Script(ids, **script)


async def test_chat(served: Serving, client: openai.AsyncOpenAI, embedded: ChatTokenizer) -> None:
    says(served, [*thought_ids(embedded, "hm"), *byte_ids(embedded, "Sunny, é👩".encode()), TURN_ENDS])
    answer = await client.chat.completions.create(model=MODEL, messages=ASKED, seed=7, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Sunny, é👩", "stop")
    assert choice.message.model_dump()["reasoning_content"] == "hm"
    submit = served.gang.submitted[-1]
    assert submit.prompt_ids == embedded.encode_chat(ASKED)
    assert (submit.params.seed, submit.params.temperature) == (7, 0.0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(submit.prompt_ids)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(thought_ids(embedded, "hm"))
    assert answer.model_dump()["gemray"]["speculation"]["method"] == "mtp"


@pytest.mark.parametrize("sizes", [(1,), (3, 7), (100,)])
async def test_streamed_chat(
    served: Serving, client: openai.AsyncOpenAI, embedded: ChatTokenizer, sizes: tuple[int, ...]
) -> None:
    ids = [*thought_ids(embedded, "hm"), *byte_ids(embedded, "Sunny, é👩".encode()), TURN_ENDS]
    says(served, ids, group_sizes=sizes)
    stream = await client.chat.completions.create(
        model=MODEL, messages=ASKED, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Sunny, é👩"
    assert "".join(delta.model_dump().get("reasoning_content") or "" for delta in deltas) == "hm"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_tool_is_called_and_answers(
    served: Serving, client: openai.AsyncOpenAI, embedded: ChatTokenizer
) -> None:
    says(served, [*call_ids(embedded, "get_weather", {"city": 'Pa"ris'}), RESPONSE])
    answer = await client.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    call: Any = choice.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": 'Pa"ris'})

    says(served, [*byte_ids(embedded, b"Sunny."), TURN_ENDS])
    told: Any = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    # The message as the client's own class writes it, with its nulls.
    messages: Any = [*ASKED, choice.message.model_dump(), told]
    answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "Sunny."
    prompt = embedded.decode(served.gang.submitted[-1].prompt_ids)
    assert "get_weather" in prompt
    assert "sun" in prompt


async def test_streamed_calls(served: Serving, client: openai.AsyncOpenAI, embedded: ChatTokenizer) -> None:
    calls = [call_ids(embedded, "get_weather", {"city": city}) for city in ("Paris", "Rome")]
    says(served, [*calls[0], *calls[1], RESPONSE], group_sizes=(2, 5))
    stream = await client.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS, stream=True)
    arguments: dict[int, str] = {}
    names, reason = [], None
    async for chunk in stream:
        reason = chunk.choices[0].finish_reason or reason
        for piece in chunk.choices[0].delta.tool_calls or []:
            assert piece.function is not None
            if piece.id:
                names.append(piece.function.name)
            arguments[piece.index] = arguments.get(piece.index, "") + (piece.function.arguments or "")
    assert (names, reason) == (["get_weather"] * 2, "tool_calls")
    assert [json.loads(text) for text in arguments.values()] == [{"city": "Paris"}, {"city": "Rome"}]


async def test_helpers_of_the_client(served: Serving, client: openai.AsyncOpenAI, embedded: ChatTokenizer) -> None:
    """What OpenAI's client builds over plain calls: a stream that is put together, and an answer as an object."""

    class Weather(pydantic.BaseModel):
        city: str

    says(served, [*byte_ids(embedded, b'{"city": "Rome"}'), TURN_ENDS], group_sizes=(4,))
    async with client.chat.completions.stream(model=MODEL, messages=ASKED, response_format=Weather) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()
    parsed = await client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Weather)
    for answer in (streamed, parsed):
        assert answer.choices[0].message.parsed == Weather(city="Rome")
    grammar = served.gang.submitted[-1].params.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == {**Weather.model_json_schema(), "additionalProperties": False}

    says(served, [*call_ids(embedded, "get_weather", {"city": "Rome"}), RESPONSE], group_sizes=(3,))
    async with client.chat.completions.stream(model=MODEL, messages=ASKED, tools=TOOLS) as calling:
        called = await calling.get_final_completion()
    assert called.choices[0].message.tool_calls is not None
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments) == {"city": "Rome"}


async def test_completion(served: Serving, client: openai.AsyncOpenAI, embedded: ChatTokenizer) -> None:
    says(served, [*byte_ids(embedded, b"abcdef"), TURN_ENDS])
    answer = await client.completions.create(model=MODEL, prompt="Hi", stop=["d"], max_tokens=20)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "stop")
    assert answer.choices[0].model_dump()["stop_reason"] == "d"
    assert served.gang.submitted[-1].prompt_ids == embedded.encode("Hi")
    stream = await client.completions.create(model=MODEL, prompt=[2, 500], stream=True, max_tokens=4)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcd"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert served.gang.submitted[-1].prompt_ids == [2, 500]


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    model = await client.models.retrieve(MODEL)
    assert (model.id, (model.model_extra or {})["checkpoint_hash"]) == (MODEL, "0123")
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt-5", messages=ASKED)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_wrong_values_are_named(client: openai.AsyncOpenAI) -> None:
    wrong: list[tuple[Any, str, str]] = [
        ({"top_p": 1.5}, "top_p", "0 < top_p <= 1"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "one of system"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type", "no images"),
        ({"extra_body": {"temprature": 1}}, "temprature", "not supported"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "1 to 256 characters"),
        ({"tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"properties": {"x": {"type": "strin"}}}}}]},
         "tools[0].function.parameters.properties.x.type", "one of object, array, string"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "text"}}}},
         "response_format.json_schema.schema", ""),
    ]  # fmt: skip
    for more, param, part in wrong:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**{"model": MODEL, "messages": ASKED, "stream": stream, **more})
            assert (caught.value.param or "").split("#")[0] == param
            assert caught.value.message.count(param) >= 1
            assert part in caught.value.message


async def test_a_prompt_that_is_too_long(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt=[2] * 2000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert "2000 tokens" in caught.value.message


@pytest.mark.parametrize("leaves", ["close", "timeout"])
async def test_a_client_that_leaves_ends_its_generation(
    served: Serving, http: HttpGateway, client: openai.AsyncOpenAI, leaves: str
) -> None:
    gang = served.gang
    says(served, [107] * 1000, stalls_after=3)
    gang.submitted.clear()
    gang.cancelled.clear()

    async def wait(seconds: float) -> None:
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=seconds).chat.completions.create(model=MODEL, messages=ASKED)

    if leaves == "close":
        stream = await client.chat.completions.create(model=MODEL, messages=ASKED, stream=True)
        await anext(aiter(stream))
        await stream.close()
    else:
        await until_taken(gang, wait)
    await eventually(lambda: len(gang.cancelled) == len(gang.submitted) and gang.num_active == 0)


async def test_the_gateways_own_time_limit(served: Serving) -> None:
    says(served, [107] * 1000, stalls_after=3)
    chunks, timeout_s = list[Any](), 0.5

    async def read(client: openai.AsyncOpenAI) -> None:
        async for chunk in await client.chat.completions.create(model=MODEL, messages=ASKED, stream=True):
            chunks.append(chunk)

    while not chunks:  # until a stream has begun before its time is over
        async with gateway(served.server.address, timeout_s=timeout_s) as http, http.client() as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model=MODEL, messages=ASKED)
            assert (caught.value.status_code, caught.value.code) == (504, "timeout")
            with pytest.raises(openai.APIError) as broken:
                await read(client)
        timeout_s *= 2
    assert (broken.value.body or {})["code"] == "timeout"  # type: ignore[index]


async def test_a_stream_that_breaks_off_says_so(served: Serving, client: openai.AsyncOpenAI) -> None:
    for script, kind in ((Script([107] * 50, die_after=3), "unavailable"), (Script([107] * 50, fault_after=3), None)):
        served.gang.script = script
        stream = await client.chat.completions.create(model=MODEL, messages=ASKED, stream=True)
        with pytest.raises(openai.APIError) as caught:
            _ = [chunk async for chunk in stream]
        assert caught.value.code == kind
        assert caught.value.message


async def test_a_server_that_ends_breaks_its_streams_off(embedded: ChatTokenizer) -> None:
    gang = FakeGang(
        Script([107] * 900, stalls_after=3), gang_info=gang_info(max_model_len=1024, vocab_size=embedded.vocab_size)
    )
    async with (
        serving(embedded, gang, drain_deadline_s=0, drain_notice_s=0) as ending,
        gateway(ending.server.address) as http,
        http.client() as client,
    ):
        stream = await client.chat.completions.create(model=MODEL, messages=ASKED, stream=True)
        chunks = aiter(stream)
        await anext(chunks)
        await ending.server.close()
        with pytest.raises(openai.APIError) as caught:
            _ = [chunk async for chunk in chunks]
        assert caught.value.code == "unavailable"
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model=MODEL, messages=ASKED)
        assert "the model's server cannot be reached" in refused.value.message


async def test_an_answer_goes_on_after_a_failure(served: Serving) -> None:
    """The gateway is patient with a server that rebuilds: its client sees one stream."""
    from gemray.client import Retry

    whole = [*range(300, 320), TURN_ENDS]
    served.gang.script = Script(whole, die_after=5)
    async with gateway(served.server.address, retry=Retry(first_s=60, resume_s=60)) as http, http.client() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=ASKED, stream=True, stream_options={"include_usage": True}
        )
        first = await anext(aiter(stream))
        served.gang.script = replace(served.gang.script, die_after=None)
        rest = [chunk async for chunk in stream]
    assert rest[-1].usage is not None
    assert rest[-1].usage.completion_tokens == len(whole)
    assert first.id == rest[-1].id
