"""Every list and text of a request has a bound, which the protocol states and the server holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from api_doc import comments_of_fields, read_protocol
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.limits import LIMITS, SAME_FIELDS, Limit, check_limits, limit_of
from gemray_cluster.server.requests import RequestReader
from gemray_cluster.server.service import SERVICE
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.errors import InvalidField
from support.cluster.fake_gang import gang_info
from support.cluster.serving import reader_of

MODEL = gang_info(max_model_len=64).model
KIB = 1 << 10


def requests_of_the_service() -> list[Descriptor]:
    return list({method.input_type.name: method.input_type for method in SERVICE.methods}.values())


def fields_within(message: Descriptor, seen: set[str] | None = None) -> Iterator[FieldDescriptor]:
    """The fields of a message and of all messages in it."""
    seen = set() if seen is None else seen
    if message.name in seen:
        return
    seen.add(message.name)
    for field in message.fields:
        yield field
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from fields_within(field.message_type, seen)


BOUNDED = {
    field.full_name.removeprefix("gemray.v1."): field
    for request in requests_of_the_service()
    for field in fields_within(request)
    if field.is_repeated or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
}


@pytest.mark.parametrize("name", BOUNDED)
def test_each_list_and_text_has_a_bound(name: str) -> None:
    limit = limit_of(BOUNDED[name])
    assert limit is not None, f"{name} needs a row in server/limits.py, and its comment the same number"
    field = BOUNDED[name]
    if limit.bounded_by is None:
        assert (limit.entries is not None) == field.is_repeated
        if field.type == FieldDescriptor.TYPE_STRING:
            assert limit.chars is not None or limit.num_bytes is not None


@pytest.mark.parametrize("name", LIMITS)
def test_the_protocol_states_each_bound(name: str) -> None:
    said = comments_of_fields(read_protocol())[name]
    for stated in _stated(LIMITS[name]):
        assert re.search(rf"(?<!\d){re.escape(stated)}(?!\d)", said), f"{name}: {stated!r} is not in {said!r}"


def _stated(limit: Limit) -> Iterator[str]:
    if limit.bounded_by is not None:
        yield limit.bounded_by
    if limit.entries is not None:
        yield str(limit.entries)
    if limit.chars is not None:
        yield str(limit.chars)
    if limit.num_bytes is not None:
        sizes = ((KIB * KIB, "MiB"), (KIB, "KiB"), (1, "bytes"))
        unit, word = next(pair for pair in sizes if limit.num_bytes >= pair[0])
        yield f"{limit.num_bytes // unit} {word}"


def test_no_row_is_left_over() -> None:
    names = {
        f"{SAME_FIELDS.get(message, message)}.{field}" for message, _, field in (n.partition(".") for n in BOUNDED)
    }
    assert set(LIMITS) == names


def _chat(**fields: Any) -> dict[str, Any]:
    return {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")], **fields)}


def _said(**fields: Any) -> dict[str, Any]:
    return {"chat": pb.Chat(messages=[pb.ChatMessage(role="assistant", **fields)])}


def _called(**fields: Any) -> dict[str, Any]:
    return _said(tool_calls=[pb.ToolCall(**{"name": "f", **fields})])


def _sampled(**fields: Any) -> dict[str, Any]:
    return {"text": "Hi", "sampling": pb.SamplingParameters(**fields)}


def _formed(**fields: Any) -> dict[str, Any]:
    return {"text": "Hi", "structured": pb.Structured(**fields)}


MAKERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "GenerateRequest.text": lambda n: {"text": "x" * n},
    "GenerateRequest.emitted_token_ids": lambda n: {**_sampled(seed=1), "emitted_token_ids": [7] * n},
    "GenerateRequest.emitted_by_answer": lambda n: {**_sampled(seed=1), "emitted_by_answer": [pb.TokenIds()] * n},
    "GenerateRequest.cache_salt": lambda n: {"text": "Hi", "cache_salt": "x" * n},
    "GenerateRequest.checkpoint_hash": lambda n: {"text": "Hi", "checkpoint_hash": "x" * n},
    "TokenIds.ids": lambda n: {"token_ids": pb.TokenIds(ids=[7] * n)},
    "Chat.messages": lambda n: {"chat": pb.Chat(messages=[pb.ChatMessage(role="user")] * n)},
    "Chat.tools_json": lambda n: _chat(tools_json="x" * n),
    "Chat.chat_template_kwargs_json": lambda n: _chat(chat_template_kwargs_json="x" * n),
    "ToolChoice.function": lambda n: _chat(tool_choice=pb.ToolChoice(function="x" * n)),
    "ChatMessage.role": lambda n: {"chat": pb.Chat(messages=[pb.ChatMessage(role="x" * n)])},
    "ChatMessage.content": lambda n: _said(content="x" * n),
    "ChatMessage.name": lambda n: {"chat": pb.Chat(messages=[pb.ChatMessage(role="tool", name="x" * n)])},
    "ChatMessage.tool_call_id": lambda n: {
        "chat": pb.Chat(messages=[pb.ChatMessage(role="tool", tool_call_id="x" * n)])
    },
    "ChatMessage.tool_calls": lambda n: _said(tool_calls=[pb.ToolCall(name="f")] * n),
    "ChatMessage.reasoning": lambda n: _said(reasoning="x" * n),
    "ToolCall.id": lambda n: _called(id="x" * n),
    "ToolCall.name": lambda n: _called(name="x" * n),
    "ToolCall.arguments_json": lambda n: _called(arguments_json="x" * n),
    "SamplingParameters.stop": lambda n: _sampled(stop=["x"] * n),
    "SamplingParameters.stop_token_ids": lambda n: _sampled(stop_token_ids=[7] * n),
    "SamplingParameters.logit_bias": lambda n: _sampled(logit_bias=dict.fromkeys(range(n), 1.0)),
    "SamplingParameters.allowed_token_ids": lambda n: _sampled(allowed_token_ids=[7] * n),
    "SamplingParameters.bad_words": lambda n: _sampled(bad_words=["x"] * n),
    "SpeculationParameters.method": lambda n: {
        "text": "Hi",
        "speculation": pb.SpeculationParameters(method="x" * n),
    },
    "Structured.json_schema": lambda n: _formed(json_schema="x" * n),
    "Structured.regex": lambda n: _formed(regex="x" * n),
    "Structured.lark": lambda n: _formed(lark="x" * n),
    "Choices.texts": lambda n: _formed(choice=pb.Choices(texts=["x"] * n)),
}
"""Bodies of a generation in which the field has a size of n."""
OTHER_CALLS = {"GenerateRequest.request_id", "TokenizeRequest.text", "DetokenizeRequest.token_ids"}
MODEL_BOUNDS = {"max_tokens": 62, "the model's length": 1 << 20, "the vocabulary": MODEL.vocab_size, "One of": 1000}
"""Sizes beyond which a field is refused for the sake of the model."""


@pytest.fixture(scope="module")
def reader(tokenizer: ChatTokenizer) -> RequestReader:
    return reader_of(tokenizer)


def test_each_row_is_tried() -> None:
    assert set(MAKERS) | OTHER_CALLS == set(LIMITS)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kind", [pb.GenerateRequest, pb.GenerateStreamRequest])
def test_one_more_is_refused(reader: RequestReader, name: str, kind: Any) -> None:
    limit = LIMITS[name]
    most = limit.entries or limit.chars or limit.num_bytes or MODEL_BOUNDS[str(limit.bounded_by)]
    with pytest.raises(InvalidField) as caught:
        reader.read(kind(**MAKERS[name](most + 1)), "r", MODEL)
    if limit.bounded_by is None:
        assert caught.value.field.endswith(name.partition(".")[2])
        assert re.search(rf"(at most|to) {most}\b", str(caught.value)), caught.value
        check_limits(kind(**MAKERS[name](most)))
    elif limit.bounded_by != "One of" and name != "TokenIds.ids":
        assert re.search(r"at most \d+\b", str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("sampling.stop[1]", _sampled(stop=["x", "y" * 257]), "1 to 256 characters"),
        ("sampling.stop[0]", _sampled(stop=[""]), "1 to 256 characters"),
        ("sampling.bad_words[0]", _sampled(bad_words=["x" * 129]), "1 to 128 characters"),
        ("structured.choice.texts[0]", _formed(choice=pb.Choices(texts=["x" * (256 * KIB + 1)])), "262144 bytes"),
        ("cache_salt", {"text": "Hi", "cache_salt": "漢" * 86}, "258 bytes is not allowed: at most 256 bytes"),
        ("chat.messages[0].tool_calls[0].id", _called(id="x" * 300), "(300 characters)"),
    ],
)
def test_entries_are_told_by_their_place(reader: RequestReader, name: str, body: Any, words: str) -> None:
    with pytest.raises(InvalidField) as caught:
        reader.read(pb.GenerateRequest(**body), "r", MODEL)
    assert caught.value.field == name
    assert words in str(caught.value)


def test_the_other_calls(reader: RequestReader) -> None:
    with pytest.raises(InvalidField, match="at most 983040 bytes"):
        reader.tokenize(pb.TokenizeRequest(text="x" * (960 * KIB + 1)))
    with pytest.raises(InvalidField, match="at most 1048576 ids"):
        reader.detokenize(pb.DetokenizeRequest(token_ids=[7] * (KIB * KIB + 1)))
