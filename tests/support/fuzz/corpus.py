"""Requests that are right, each of another kind: mutations begin from them."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.message import Message

from gemray.v1 import generation_pb2 as pb

TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Weather of a city",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "enum": [1, 2]}},
                    "required": ["city"],
                },
            },
        }
    ]
)
SCHEMA = json.dumps(
    {
        "$defs": {
            "node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
        },
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
)
LARK = 'start: "yes" | "no" NUMBER\nNUMBER: /[0-9]+/\n'

_USER = pb.ChatMessage(role="user", content="What is the weather in Paris?")
_CALL = pb.ToolCall(id="c1", name="get_weather", arguments_json='{"city": "Paris"}')
_TURNS = [
    pb.ChatMessage(role="system", content="Be brief."),
    _USER,
    pb.ChatMessage(role="assistant", reasoning="Ask the tool.", tool_calls=[_CALL]),
    pb.ChatMessage(role="tool", tool_call_id="c1", content="Sunny <turn|>"),
]
_SAMPLING = pb.SamplingParameters(
    temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, seed=5, max_tokens=6, min_tokens=1, stop=["\n\n", "<turn|>"],
    stop_token_ids=[7], repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={9: 1.5},
    allowed_token_ids=range(100, 400), logprobs=2, prompt_logprobs=1, skip_special_tokens=False,
    include_stop_str_in_output=True,
)  # fmt: skip

_BODIES: tuple[dict[str, Any], ...] = (
    {"text": "import this"},
    {"text": "Zdravím 👩‍👩‍👧 漢字 <|turn>", "request_id": "r-1", "cache_salt": "salt", "sampling": _SAMPLING},
    {"token_ids": pb.TokenIds(ids=[2, 10, 11, 12]), "speculation": pb.SpeculationParameters(num_draft_tokens=3)},
    {"chat": pb.Chat(messages=[_USER], enable_thinking=True, chat_template_kwargs_json='{"mood": "calm"}')},
    {"chat": pb.Chat(messages=_TURNS, tools_json=TOOLS)},
    {"chat": pb.Chat(messages=[_USER], tools_json=TOOLS, tool_choice=pb.ToolChoice(function="get_weather"))},
    {
        "chat": pb.Chat(
            messages=[_USER], tools_json=TOOLS, tool_choice=pb.ToolChoice(mode="TOOL_CHOICE_MODE_REQUIRED"),
            parallel_tool_calls=False,
        )
    },
    {"chat": pb.Chat(messages=[_USER, pb.ChatMessage(role="model", content="It is")], continue_final_message=True)},
    {"text": "Say", "structured": pb.Structured(json_schema=SCHEMA, thought_first=True)},
    {"text": "Say", "structured": pb.Structured(json_object=True)},
    {"text": "Say", "structured": pb.Structured(regex="[a-z]{1,8}(-[0-9]+)?")},
    {"text": "Say", "structured": pb.Structured(choice=pb.Choices(texts=["yes", "no", "漢"]))},
    {"text": "Say", "structured": pb.Structured(lark=LARK)},
    {"text": "Go on", "sampling": pb.SamplingParameters(seed=9, max_tokens=8), "emitted_token_ids": [120, 121]},
)  # fmt: skip


def corpus() -> list[tuple[str, Message]]:
    """(call, request) of every call that takes something."""
    generations = [("Generate", pb.GenerateRequest(**body)) for body in _BODIES]
    streams = [("GenerateStream", pb.GenerateStreamRequest(**body)) for body in _BODIES]
    chats = [("Tokenize", pb.TokenizeRequest(chat=body["chat"])) for body in _BODIES if "chat" in body]
    others = [
        ("Tokenize", pb.TokenizeRequest(text="<|turn>user\nHi")),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[2, 300, 301, 106], skip_special_tokens=False)),
        ("GetModelInfo", pb.GetModelInfoRequest()),
        ("GetServerStats", pb.GetServerStatsRequest()),
    ]
    return [*generations, *streams, *chats, *others]
