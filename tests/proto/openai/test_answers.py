"""Answers and errors of the protocol as the OpenAI endpoints tell them."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from gemray.client import ClientError, RequestRefused
from gemray.openai.chat_answers import ChatChunks, whole_chat
from gemray.openai.completion_answers import CompletionChunks, whole_completion
from gemray.openai.errors import MAX_SHOWN_CHARS, http_error_of, shown
from gemray.openai.field_names import http_name
from gemray.openai.head import Head
from gemray.v1 import generation_pb2 as pb

HEAD = Head("id-1", 5, "m", "f")
USAGE = pb.Usage(prompt_tokens=5, cached_tokens=4, completion_tokens=3, reasoning_tokens=1)
DONE = pb.Completion(finish_reason=pb.FINISH_REASON_STOP_TOKEN, stop_token_id=106, usage=USAGE, seed=7)
CALL = pb.ToolCall(id="c1", name="f", arguments_json="{}")
LOGPROB = pb.TokenLogprob(
    token_id=5,
    logprob=-0.5,
    text="é",
    top=[pb.TopLogprob(token_id=5, logprob=-0.5, text="é"), pb.TopLogprob(token_id=6, logprob=float("-inf"), text="x")],
)
PART = pb.TokenLogprob(token_id=7, logprob=-1, text="\ufffd", token_bytes=b"\xc3")


def test_a_whole_chat() -> None:
    body = whole_chat(HEAD, pb.GenerateResponse(text="Hello", reasoning="hm", completion=DONE))
    assert body == {
        "id": "id-1", "object": "chat.completion", "created": 5, "model": "m", "system_fingerprint": "f",
        "choices": [
            {
                "index": 0, "message": {"role": "assistant", "content": "Hello", "reasoning_content": "hm"},
                "logprobs": None, "finish_reason": "stop", "stop_reason": 106,
            }
        ],
        "usage": {
            "prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 1},
        },
        "gemray": {"seed": 7},
    }  # fmt: skip


def test_calls_and_their_reason() -> None:
    for reason in (pb.FINISH_REASON_TOOL_CALL, pb.FINISH_REASON_FORM_COMPLETE):
        answer = pb.GenerateResponse(tool_calls=[CALL], completion=pb.Completion(finish_reason=reason, usage=USAGE))
        (choice,) = whole_chat(HEAD, answer)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"] == {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        }


def test_a_call_that_a_stop_string_cuts_is_not_to_be_answered() -> None:
    done = pb.Completion(finish_reason=pb.FINISH_REASON_STOP_STRING, stop_string="x", usage=USAGE)
    cut = pb.ToolCall(id="c2", name="f", arguments_json='{"a":', is_incomplete=True)
    (choice,) = whole_chat(HEAD, pb.GenerateResponse(tool_calls=[CALL, cut], completion=done))["choices"]
    assert choice["finish_reason"] == "stop"
    chunks = ChatChunks(HEAD, tells_usage=False)
    pieces = [pb.ToolCallDelta(index=0, name="f", arguments_json="{}", is_complete=True), pb.ToolCallDelta(index=1)]
    for piece in pieces:
        list(chunks.of(pb.GenerateStreamResponse(delta=pb.Delta(tool_calls=[piece]))))
    (last,) = chunks.of(pb.GenerateStreamResponse(final=done))
    assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (pb.FINISH_REASON_STOP_STRING, "stop"),
        (pb.FINISH_REASON_FORM_COMPLETE, "stop"),
        (pb.FINISH_REASON_LENGTH, "length"),
    ],
)
def test_every_reason_has_a_name(reason: Any, told: str) -> None:
    answer = pb.GenerateResponse(completion=pb.Completion(finish_reason=reason))
    assert whole_completion(HEAD, answer)["choices"][0]["finish_reason"] == told


def test_speculation_is_told() -> None:
    counters = pb.Speculation(method="mtp", rounds=2, drafted=8, accepted=3, accepted_per_position=[2, 1])
    completion = pb.Completion(finish_reason=pb.FINISH_REASON_LENGTH, speculation=counters)
    assert whole_completion(HEAD, pb.GenerateResponse(completion=completion))["gemray"]["speculation"] == {
        "method": "mtp",
        "rounds": 2,
        "drafted": 8,
        "accepted": 3,
        "accepted_per_position": [2, 1],
    }


def test_log_probabilities() -> None:
    answer = pb.GenerateResponse(text="é", logprobs=[LOGPROB, PART], completion=DONE)
    (choice,) = whole_chat(HEAD, answer)["choices"]
    first, second = choice["logprobs"]["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("é", -0.5, [0xC3, 0xA9])
    assert [(top["token"], top["logprob"]) for top in first["top_logprobs"]] == [("é", -0.5), ("x", -9999.0)]
    assert (second["token"], second["bytes"]) == ("\ufffd", [0xC3])
    (choice,) = whole_completion(HEAD, answer)["choices"]
    assert choice["logprobs"] == {
        "tokens": ["é", "\ufffd"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"é": -0.5, "x": -9999.0}, {}],
        "text_offset": [0, 1],
    }


def test_an_echo_has_the_prompts_log_probabilities() -> None:
    answer = pb.GenerateResponse(
        text="éx",
        prompt_logprobs=[LOGPROB],
        logprobs=[PART],
        completion=DONE,
        other_answers=[pb.Answer(completion=DONE)],
    )
    first, second = whole_completion(HEAD, answer)["choices"]
    assert first["logprobs"]["tokens"] == ["", "é", "\ufffd"]
    assert first["logprobs"]["token_logprobs"] == [None, -0.5, -1.0]
    assert first["logprobs"]["text_offset"] == [0, 0, 1]
    assert first["logprobs"]["top_logprobs"][0] is None
    assert second["logprobs"]["tokens"] == ["", "é"]
    chunks = CompletionChunks(HEAD, tells_usage=False)
    told = [
        event["choices"][0]["logprobs"]["token_logprobs"]
        for delta in (pb.Delta(prompt_logprobs=[LOGPROB]), pb.Delta(prompt_logprobs=[PART]), pb.Delta(logprobs=[PART]))
        for event in chunks.of(pb.GenerateStreamResponse(delta=delta))
    ]
    assert told == [[None, -0.5], [-1.0], [-1.0]]


def test_several_answers() -> None:
    answer = pb.GenerateResponse(text="a", completion=DONE, other_answers=[pb.Answer(text="b", completion=DONE)])
    assert [(c["index"], c["message"]["content"]) for c in whole_chat(HEAD, answer)["choices"]] == [(0, "a"), (1, "b")]
    chunks = ChatChunks(HEAD, tells_usage=False, num_answers=2)
    events = [*chunks.begin()]
    for message in (
        pb.GenerateStreamResponse(delta=pb.Delta(text="b", index=1)),
        pb.GenerateStreamResponse(answer_end=pb.AnswerEnd(index=1, completion=DONE)),
        pb.GenerateStreamResponse(delta=pb.Delta(text="a")),
        pb.GenerateStreamResponse(answer_end=pb.AnswerEnd(index=0, completion=DONE)),
        pb.GenerateStreamResponse(final=DONE),
    ):
        events += chunks.of(message)
    told = [(c["index"], c["delta"].get("content"), c["finish_reason"]) for event in events for c in event["choices"]]
    assert told == [
        (0, "", None), (1, "", None), (1, "b", None), (1, None, "stop"), (0, "a", None), (0, None, "stop"),
    ]  # fmt: skip


def test_chunks_of_a_chat() -> None:
    chunks = ChatChunks(HEAD, tells_usage=True)
    call = pb.ToolCallDelta(index=0, id="c1", name="f", arguments_json="{")
    rest = pb.ToolCallDelta(arguments_json="}", is_complete=True)
    events = [
        *chunks.begin(),
        *chunks.of(pb.GenerateStreamResponse(delta=pb.Delta(token_ids=[5]))),  # no text yet: no chunk
        *chunks.of(pb.GenerateStreamResponse(delta=pb.Delta(reasoning="hm", text="Hi", logprobs=[PART]))),
        *chunks.of(pb.GenerateStreamResponse(delta=pb.Delta(tool_calls=[call]))),
        *chunks.of(pb.GenerateStreamResponse(delta=pb.Delta(tool_calls=[rest]))),
        *chunks.of(pb.GenerateStreamResponse(final=DONE)),
    ]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert [event["choices"][0]["delta"] for event in events[:-1]] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm", "content": "Hi"},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {},
    ]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert [event["usage"] for event in events[:-1]] == [None] * 5
    assert (events[-1]["choices"], events[-1]["usage"]["total_tokens"]) == ([], 8)
    assert events[-1]["gemray"] == {"seed": 7}


def test_chunks_of_a_completion() -> None:
    chunks = CompletionChunks(HEAD, tells_usage=False)
    events = [
        *chunks.begin(),
        *chunks.of(pb.GenerateStreamResponse(delta=pb.Delta(text="é", logprobs=[LOGPROB]))),
        *chunks.of(pb.GenerateStreamResponse(delta=pb.Delta(logprobs=[PART]))),
        *chunks.of(pb.GenerateStreamResponse(final=DONE)),
    ]
    assert [event["choices"][0]["text"] for event in events] == ["é", "", ""]
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events[:2]] == [[0], [1]]
    assert "usage" not in events[-1]


def client_error(code: grpc.StatusCode, details: str = "why", **more: Any) -> ClientError:
    error = RequestRefused("host:1: why")
    error.code, error.details = code, details
    for name, value in more.items():
        setattr(error, name, value)
    return error


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("INVALID_ARGUMENT", 400),
        ("UNAUTHENTICATED", 401),
        ("PERMISSION_DENIED", 403),
        ("NOT_FOUND", 404),
        ("UNIMPLEMENTED", 501),
        ("UNAVAILABLE", 503),
        ("DEADLINE_EXCEEDED", 504),
        ("INTERNAL", 500),
        ("UNKNOWN", 500),
    ],
)
def test_statuses(code: str, status: int) -> None:
    retry_after_s = 1.0 if code == "UNAVAILABLE" else None
    error = http_error_of(client_error(grpc.StatusCode[code], retry_after_s=retry_after_s))
    assert (error.status, error.body["error"]["message"]) == (status, "why")
    assert ("retry-after" in error.headers) == (status == 503)
    assert ("www-authenticate" in error.headers) == (status == 401)


def test_where_the_server_is_stays_secret() -> None:
    error = http_error_of(client_error(grpc.StatusCode.UNAVAILABLE, "connect to ipv4:10.0.0.7:50051 failed"))
    assert (error.status, error.message) == (503, "the model's server cannot be reached")


def test_what_is_exhausted() -> None:
    busy = http_error_of(client_error(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_s=0.5))
    assert (busy.status, busy.code, busy.headers["retry-after"]) == (429, "rate_limit_exceeded", "1")
    assert http_error_of(client_error(grpc.StatusCode.RESOURCE_EXHAUSTED)).status == 413


def test_fields_have_the_names_that_the_client_knows() -> None:
    wrong = client_error(
        grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p = 2.0 is not allowed: 0 < top_p <= 1", field="sampling.top_p"
    )
    error = http_error_of(wrong).body["error"]
    assert (error["param"], error["type"]) == ("top_p", "invalid_request_error")
    assert error["message"] == "top_p = 2.0 is not allowed: 0 < top_p <= 1"
    too_long = client_error(
        grpc.StatusCode.INVALID_ARGUMENT, "chat has 9 tokens, but the prompt may have at most 7: this", field="chat"
    )
    error = http_error_of(too_long).body["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("sampling.max_tokens", "max_tokens"),
        ("sampling.logprobs", "top_logprobs"),
        ("chat.messages", "messages"),
        ("chat.messages[3].tool_call_id", "messages[3].tool_call_id"),
        ("chat.messages[3].tool_calls[0].name", "messages[3].tool_calls[0].function.name"),
        ("chat.messages[3].tool_calls[0].arguments_json", "messages[3].tool_calls[0].function.arguments"),
        ("chat.messages[3].reasoning", "messages[3].reasoning_content"),
        ("chat.tools_json", "tools"),
        ("chat.tools_json[1].function.parameters.properties.x.type", "tools[1].function.parameters.properties.x.type"),
        ("chat.tool_choice.function", "tool_choice.function.name"),
        ("chat.tool_choice.mode", "tool_choice"),
        ("chat.parallel_tool_calls", "parallel_tool_calls"),
        ("structured.json_schema#/properties/a", "response_format.json_schema.schema#/properties/a"),
        ("speculation.num_draft_tokens", "num_draft_tokens"),
        ("speculation.method", "draft_method"),
        ("structured.choice.texts", "structured_outputs.choice"),
        ("structured.lark", "structured_outputs.grammar"),
        ("structured", "response_format"),
        ("text", "prompt"),
        ("token_ids.ids", "prompt"),
        ("cache_salt", "cache_salt"),
    ],
)
def test_names_of_fields(field: str, name: str) -> None:
    assert http_name(field) == name


def test_a_long_value_is_cut() -> None:
    assert len(shown("x" * 10**6)) < MAX_SHOWN_CHARS + 9
    assert len(shown(list(range(10**6)))) < MAX_SHOWN_CHARS + 9
