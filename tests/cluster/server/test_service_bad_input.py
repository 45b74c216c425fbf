"""Every value that is not allowed: INVALID_ARGUMENT naming the field, nothing reaches a rank, the server lives on."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.fake_gang import FakeGang, Script, gang_info
from support.cluster.serving import Serving, bad_request_of, serving

NAN = math.nan
INF = math.inf

USER = pb.ChatMessage(role="user", content="Hi")


def sampled(**fields: Any) -> dict[str, Any]:
    return {"text": "Hi", "sampling": pb.SamplingParameters(**fields)}


def tooled(tools_json: str) -> dict[str, Any]:
    return {"chat": pb.Chat(messages=[USER], tools_json=tools_json)}


BAD = [
    ("input", {}, "one of text, token_ids, chat"),
    ("text", {"text": ""}, "at least one token"),
    ("token_ids", {"token_ids": pb.TokenIds()}, "at least one token"),
    ("token_ids.ids", {"token_ids": pb.TokenIds(ids=[2, 2048])}, "0..2047"),
    ("token_ids", {"token_ids": pb.TokenIds(ids=[2] * 64)}, "64 tokens, but the prompt may have at most 63"),
    ("token_ids", {"token_ids": pb.TokenIds(ids=[2] * 500)}, "500 tokens, but the prompt may have at most 63"),
    ("text", {"text": "漢" * 100}, "301 tokens, but the prompt may have at most 63"),
    ("chat.messages", {"chat": pb.Chat()}, "at least one message"),
    ("chat.messages[0].role", {"chat": pb.Chat(messages=[pb.ChatMessage(content="Hi")])}, "role"),
    (
        "chat.messages[1].role",
        {"chat": pb.Chat(messages=[USER, pb.ChatMessage(role="clown", content="Hi")])},
        "one of system, developer, user, assistant, model, tool",
    ),
    (
        "chat",
        {"chat": pb.Chat(messages=[USER, pb.ChatMessage(role="developer", content="Hi")])},
        "unknown role developer",
    ),
    ("chat.tools_json", {"chat": pb.Chat(messages=[USER], tools_json="{")}, "JSON array"),
    ("chat.tools_json", {"chat": pb.Chat(messages=[USER], tools_json='{"name": 1}')}, "array of objects"),
    ("chat.tools_json", {"chat": pb.Chat(messages=[USER], tools_json="[1]")}, "array of objects"),
    ("chat.tools_json", tooled('[{"name": "\\ud800"}]'), "lone surrogates"),
    ("chat.tools_json", tooled('[{"\\udfff": 1}]'), "lone surrogates"),
    ("chat.tools_json", tooled('[{"a": ["\\ud83d"]}]'), "lone surrogates"),
    ("chat.tools_json", tooled("[" * 200 + "]" * 200), "JSON array of objects"),
    ("chat.tools_json", tooled('[{"a":' * 33 + "1" + "}]" * 33), "at most 64 deep"),
    ("chat.tools_json", tooled('[{"a": NaN}]'), "is not JSON: NaN is no number of it"),
    ("chat.tools_json", tooled('[{"a": -Infinity}]'), "no number of it"),
    ("chat.tools_json", tooled('[{"a": 1e999}]'), "has 1e999, beyond a number's range"),
    ("chat.tools_json", tooled('[{"a": -' + "9" * 5000 + "}]"), "an integer of 5000 digits, at most 4300 are read"),
    ("chat.tools_json", tooled('[{"name": "f", "name": "g"}]'), '(this names "name" more than once in one object)'),
    ("chat.tools_json", tooled("[" + "{}," * 1024 + "{}]"), "at most 1024"),
    ("chat.tools_json[0].name", tooled("[{}]"), "unset is not allowed: the function's name"),
    ("chat.tools_json[1].name", tooled('[{"name": "f"}, {"name": 5}]'), "5 is not allowed: the function's name"),
    ("chat.tools_json[0].name", tooled('[{"name": "f g"}]'), "letters, digits and _ . / : -"),
    ("chat.tools_json[1].name", tooled('[{"name": "f"}, {"name": "f"}]'), "a name that no tool before it has"),
    ("chat.tools_json[0].strict", tooled('[{"name": "f", "strict": 1}]'), "true or false"),
    ("chat.tools_json[0].description", tooled('[{"name": "f", "description": 5}]'), "a string"),
    ("chat.tools_json[0].type", tooled('[{"type": "web_search", "name": "f"}]'), "function"),
    ("chat.tools_json[0].function", tooled('[{"type": "function"}]'), "an object with name, description and"),
    ("chat.tools_json[0].function", tooled('[{"type": "function", "function": 5}]'), "an object with name"),
    ("chat.tools_json[0].function.name", tooled('[{"type": "function", "function": {"name": ""}}]'), "1 to 256"),
    ("chat.tools_json[0].parameters", tooled('[{"name": "f", "parameters": 5}]'), "a JSON schema"),
    ("chat.tools_json[0].parameters.type", tooled('[{"name": "f", "parameters": {"type": "string"}}]'), "object"),
    (
        'chat.tools_json[1].function.parameters.properties["a b"].items.anyOf[1].type',
        tooled(
            '[{"name": "f"}, {"function": {"name": "g", "parameters": {"properties": '
            '{"a b": {"items": {"anyOf": [{}, {"type": "strin"}]}}}}}}]'
        ),
        "'strin' is not allowed: one of object, array, string",
    ),
    ("chat.messages[0].role", {"chat": pb.Chat(messages=[pb.ChatMessage(role="x" * 5000)])}, "(5000 characters)"),
    ("request_id", {"text": "Hi", "request_id": ""}, "visible ASCII"),
    ("request_id", {"text": "Hi", "request_id": "a b"}, "visible ASCII"),
    ("request_id", {"text": "Hi", "request_id": "ď"}, "visible ASCII"),
    ("request_id", {"text": "Hi", "request_id": "a" * 129}, "1 to 128"),
    ("sampling.temperature", sampled(temperature=NAN), "0 (greedy), or"),
    ("sampling.temperature", sampled(temperature=-0.1), "0 (greedy), or"),
    ("sampling.temperature", sampled(temperature=INF), "0 (greedy), or"),
    ("sampling.temperature", sampled(temperature=1e-9), "0 (greedy), or"),
    ("sampling.top_k", sampled(top_k=-1), ">= 0"),
    ("sampling.top_p", sampled(top_p=0.0), "0 < top_p <= 1"),
    ("sampling.top_p", sampled(top_p=1.01), "0 < top_p <= 1"),
    ("sampling.top_p", sampled(top_p=NAN), "0 < top_p <= 1"),
    ("sampling.min_p", sampled(min_p=-0.1), "0.0..1.0"),
    ("sampling.min_p", sampled(min_p=1.1), "0.0..1.0"),
    ("sampling.min_p", sampled(min_p=NAN), "0.0..1.0"),
    ("sampling.max_tokens", sampled(max_tokens=-1), ">= 0"),
    ("sampling.max_tokens", sampled(max_tokens=-5), ">= 0"),
    ("sampling.min_tokens", sampled(min_tokens=-1), ">= 0"),
    ("sampling.min_tokens", sampled(max_tokens=3, min_tokens=4), "0..3"),
    ("sampling.min_tokens", sampled(min_tokens=64), "model's length"),
    ("sampling.stop[0]", sampled(stop=[""]), "1 to 256 characters"),
    ("sampling.stop[1]", sampled(stop=["x", ""]), "1 to 256 characters"),
    ("sampling.stop[0]", sampled(stop=["x" * 257]), "1 to 256 characters"),
    ("sampling.stop", sampled(stop=["x"] * 17), "at most 16"),
    ("sampling.stop_token_ids", sampled(stop_token_ids=[2048]), "0..2047"),
    ("sampling.stop_token_ids", sampled(stop_token_ids=[7] * 257), "257 ids is not allowed: at most 256 ids"),
    ("sampling.repetition_penalty", sampled(repetition_penalty=0.0), "0.01 <= value"),
    ("sampling.repetition_penalty", sampled(repetition_penalty=NAN), "0.01 <= value"),
    ("sampling.repetition_penalty", sampled(repetition_penalty=1e-320), "0.01 <= value"),
    ("text", {"text": "ab " * 100_000}, "300000 bytes"),
    ("chat", {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="ab " * 100_000)])}, "bytes is not"),
    ("sampling.presence_penalty", sampled(presence_penalty=2.5), "-2.0..2.0"),
    ("sampling.presence_penalty", sampled(presence_penalty=NAN), "-2.0..2.0"),
    ("sampling.frequency_penalty", sampled(frequency_penalty=-INF), "-2.0..2.0"),
    ("sampling.logit_bias", sampled(logit_bias={2048: 1.0}), "0..2047"),
    ("sampling.logit_bias", sampled(logit_bias=dict.fromkeys(range(2049), 1.0)), "2049 ids is not allowed"),
    ("sampling.logit_bias[5]", sampled(logit_bias={5: NAN}), "-100.0..100.0"),
    ("sampling.logit_bias[5]", sampled(logit_bias={5: INF}), "-100.0..100.0"),
    ("sampling.allowed_token_ids", sampled(allowed_token_ids=[7, 9999]), "0..2047"),
    ("sampling.allowed_token_ids", sampled(allowed_token_ids=[7] * 2049), "2049 ids is not allowed: at most 2048 ids"),
    ("sampling.allowed_token_ids", sampled(allowed_token_ids=[7] * 14_000_000), "14000000 ids is not allowed"),
    ("sampling.allowed_token_ids", sampled(allowed_token_ids=[1, 106], min_tokens=1), "nor, with min_tokens, a stop"),
    ("sampling.logprobs", sampled(logprobs=21), "0..20"),
    ("sampling.logprobs", sampled(logprobs=-1), "0..20"),
    ("sampling.prompt_logprobs", sampled(prompt_logprobs=21), "0..20"),
    (
        "speculation.num_draft_tokens",
        {"text": "Hi", "speculation": pb.SpeculationParameters(num_draft_tokens=-1)},
        "an integer >= 0",
    ),
    *(
        (
            "speculation.method",
            {"text": "Hi", "speculation": pb.SpeculationParameters(method=method)},
            f"speculation.method = {method!r} is not allowed: one of auto, none, mtp on this server, which has mtp",
        )
        for method in ("dflash", "", "MTP")
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Serving]:
    gang = FakeGang(Script([120, 121, 106]), gang_info(max_model_len=64, num_draft_tokens=4))
    async with serving(tokenizer, gang) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize(("field", "request_fields", "words"), BAD)
async def test_bad_value(served: Serving, method: str, field: str, request_fields: dict[str, Any], words: str) -> None:
    before = len(served.gang.submitted)
    call = {
        "Generate": lambda: served.stub.Generate(pb.GenerateRequest(**request_fields)),
        "GenerateStream": lambda: served.stream(pb.GenerateStreamRequest(**request_fields)),
    }[method]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    named, description = bad_request_of(caught.value)
    assert named == field
    assert words in description
    assert caught.value.details() == description
    assert len(served.gang.submitted) == before, "nothing may reach a rank"

    alive = await served.stub.Generate(pb.GenerateRequest(text="Hi"))
    assert list(alive.token_ids) == [120, 121, 106]
    assert served.server.limiter.active == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_message_larger_than_the_limit(served: Serving) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Generate(pb.GenerateRequest(text="x" * (17 << 20)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await served.stub.Generate(pb.GenerateRequest(text="Hi"))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("request_fields", "field"), [({}, "input"), ({"chat": pb.Chat()}, "chat.messages")], ids=["none", "no messages"]
)
async def test_tokenize_bad_value(served: Serving, request_fields: dict[str, Any], field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Tokenize(pb.TokenizeRequest(**request_fields))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert bad_request_of(caught.value)[0] == field
