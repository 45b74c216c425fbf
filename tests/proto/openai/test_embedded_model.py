"""OpenAI's client, the gateway, the server and a real model: what comes out is what gRPC gives."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio

from gemray.client import AsyncClient
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.server import GenerationServer
from support.cluster.embedded_server import embedded_server
from support.cluster.http_gateway import gateway
from support.waiting import HANG_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED: Any = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ARGUMENTS = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
TOOLS: Any = [{"type": "function", "function": {"name": "get_heat", "description": "Heat.", "parameters": ARGUMENTS}}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[GenerationServer]:
    async with embedded_server() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server: GenerationServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with gateway(server.address) as http, http.client() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(client: openai.AsyncOpenAI) -> str:
    (served,) = [served async for served in client.models.list()]
    return served.id


async def test_http_gives_what_grpc_gives(server: GenerationServer, client: openai.AsyncOpenAI, model: str) -> None:
    sampling = pb.SamplingParameters(seed=7, max_tokens=30)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=ASKED[0]["content"])])
    async with AsyncClient(server.address) as grpc:
        wanted = await grpc.generate(pb.GenerateRequest(chat=chat, sampling=sampling))
    assert len(wanted.text) > 20
    body: Any = {"model": model, "messages": ASKED, "seed": 7, "max_completion_tokens": 30}
    whole = await client.chat.completions.create(**body)
    assert whole.choices[0].message.content == wanted.text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == wanted.completion.usage.completion_tokens
    assert whole.model_dump()["gemray"]["speculation"]["drafted"] > 0
    for more in ({}, {"num_draft_tokens": 0}):
        stream = await client.chat.completions.create(**body, stream=True, extra_body=more)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == wanted.text


async def test_the_seed_that_is_told_gives_the_answer_again(client: openai.AsyncOpenAI, model: str) -> None:
    first = await client.completions.create(model=model, prompt="def add(", max_tokens=12)
    seed = first.model_dump()["gemray"]["seed"]
    again = await client.completions.create(model=model, prompt="def add(", max_tokens=12, seed=seed)
    assert again.choices[0].text == first.choices[0].text


async def test_a_schema_is_followed(client: openai.AsyncOpenAI, model: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    answer = await client.chat.completions.create(
        model=model, messages=ASKED, response_format=form, seed=3, max_tokens=200
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


async def test_a_required_tool_is_called_and_answers(client: openai.AsyncOpenAI, model: str) -> None:
    body: Any = {"model": model, "tools": TOOLS, "seed": 5, "max_tokens": 60}
    named: Any = {"type": "function", "function": {"name": "get_heat"}}
    answer = await client.chat.completions.create(messages=ASKED, tool_choice=named, **body)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")
    stream = await client.chat.completions.create(messages=ASKED, tool_choice=named, stream=True, **body)
    pieces = [piece async for chunk in stream for piece in chunk.choices[0].delta.tool_calls or []]
    assert "".join((piece.function and piece.function.arguments) or "" for piece in pieces) == call.function.arguments
    told: Any = [*ASKED, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    answer = await client.chat.completions.create(messages=told, tool_choice="none", **{**body, "max_tokens": 8})
    assert answer.choices[0].message.tool_calls is None


async def test_log_probabilities_name_their_tokens(client: openai.AsyncOpenAI, model: str) -> None:
    answer = await client.chat.completions.create(
        model=model, messages=ASKED, logprobs=True, top_logprobs=2, max_tokens=8, temperature=0
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 8
    spelt = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert spelt.decode(errors="replace").startswith(choice.message.content or "x")
    for token in choice.logprobs.content:
        assert token.token == token.top_logprobs[0].token, "greedy takes the best one"


async def test_an_echo_tells_of_the_prompts_tokens(client: openai.AsyncOpenAI, model: str) -> None:
    body: Any = {
        "model": model,
        "prompt": "def add(a, b):",
        "echo": True,
        "logprobs": 1,
        "max_tokens": 4,
        "temperature": 0,
    }
    answer = await client.completions.create(**body)
    (choice,) = answer.choices
    assert choice.text.startswith("def add(a, b):")
    told: Any = choice.logprobs
    assert answer.usage is not None
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == answer.usage.total_tokens
    assert "".join(told.tokens) == choice.text
    assert told.token_logprobs[0] is None
    streamed = [chunk.choices[0] async for chunk in await client.completions.create(**body, stream=True)]
    assert "".join(choice.text for choice in streamed) == choice.text
    tokens = [token for choice in streamed if choice.logprobs for token in choice.logprobs.tokens or []]
    assert tokens == told.tokens


async def test_a_prompt_is_scored_without_an_answer(client: openai.AsyncOpenAI, model: str) -> None:
    """As programs that evaluate models ask for it."""
    body: Any = {"model": model, "prompt": "def add(a, b):", "echo": True, "logprobs": 2, "temperature": 0}
    (scored,) = (await client.completions.create(**body, max_tokens=0)).choices
    (longer,) = (await client.completions.create(**body, max_tokens=4)).choices
    told, more = scored.logprobs, longer.logprobs
    assert told is not None
    assert more is not None
    assert (scored.text, scored.finish_reason) == ("def add(a, b):", "length")
    assert "".join(told.tokens or []) == scored.text
    num_tokens = len(told.tokens or [])
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert getattr(told, name) == getattr(more, name)[:num_tokens]
    chunks = [chunk async for chunk in await client.completions.create(**body, max_tokens=0, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == scored.text
    assert [value for c in chunks if (of := c.choices[0].logprobs) for value in of.token_logprobs or []] == (
        told.token_logprobs
    )


async def test_several_answers(client: openai.AsyncOpenAI, model: str) -> None:
    body: Any = {"model": model, "prompt": "def add(", "max_tokens": 10}
    alone = [(await client.completions.create(**body, seed=seed)).choices[0].text for seed in (4, 5)]
    together = await client.completions.create(**body, seed=4, n=2)
    assert [choice.text for choice in together.choices] == alone
    texts = ["", ""]
    async for chunk in await client.completions.create(**body, seed=4, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == alone


async def test_a_client_that_leaves_frees_the_engine(
    server: GenerationServer, client: openai.AsyncOpenAI, model: str
) -> None:
    stream = await client.completions.create(
        model=model, prompt="def", stream=True, max_tokens=1000, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    await eventually(lambda: server.limiter.active == 0, HANG_S)
    async with AsyncClient(server.address) as grpc:
        for _ in range(100):
            stats = await grpc.server_stats()
            if stats.engine.num_running == 0:
                break
            await grpc.generate(pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(max_tokens=1)))
        assert stats.engine.num_running == 0
