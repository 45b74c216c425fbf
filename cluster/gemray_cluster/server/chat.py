"""The chat of a request: every length is checked before anything is built from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.chat_messages import read_messages
from gemray_cluster.server.json_input import check_content, read_json, read_object
from gemray_cluster.text.control_tokens import ANSWERING_ROLES
from gemray_workers.errors import InvalidField, Summary

MAX_TOOLS = 1024
MAX_KWARGS_BYTES = 64 << 10


@dataclass(frozen=True)
class ChatInput:
    """What a chat template is given."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    enable_thinking: bool | None
    parse_control_tokens: bool
    continue_final_message: bool
    variables: dict[str, Any]
    """Variables of the template, besides its own."""


def read_chat(chat: pb.Chat) -> ChatInput:
    """Check and unpack a chat; raises InvalidField."""
    tools = _read_tools(chat.tools_json) if chat.HasField("tools_json") else None
    may_call = read_tool_choice(chat) != pb.TOOL_CHOICE_MODE_NONE
    messages = read_messages(chat.messages)
    if chat.continue_final_message:
        _check_final(messages[-1])
    return ChatInput(
        messages=messages,
        tools=tools if may_call else None,
        enable_thinking=chat.enable_thinking if chat.HasField("enable_thinking") else None,
        parse_control_tokens=chat.parse_control_tokens,
        continue_final_message=chat.continue_final_message,
        variables=_read_variables(chat.chat_template_kwargs_json) if chat.chat_template_kwargs_json else {},
    )


def _check_final(message: dict[str, Any]) -> None:
    if message["role"] not in ANSWERING_ROLES or "tool_calls" in message:
        raise InvalidField(
            "chat.continue_final_message", True, "false, unless the last message is an assistant's without calls"
        )


def _read_variables(kwargs_json: str) -> dict[str, Any]:
    field = "chat.chat_template_kwargs_json"
    variables = read_object(field, kwargs_json, most_bytes=MAX_KWARGS_BYTES)
    for name in variables:
        if not name.isidentifier() or name.startswith("_"):
            raise InvalidField(field, Summary.of_text(name), "names of variables: letters, digits and _")
    return variables


def read_tool_choice(chat: pb.Chat) -> pb.ToolChoiceMode:
    """Whether the model may call; raises InvalidField for choices that nothing here holds a model to."""
    choice = chat.tool_choice
    if choice.WhichOneof("choice") is None or choice.mode == pb.TOOL_CHOICE_MODE_AUTO:
        return pb.TOOL_CHOICE_MODE_AUTO
    if choice.mode == pb.TOOL_CHOICE_MODE_NONE:
        return pb.TOOL_CHOICE_MODE_NONE
    allowed = "TOOL_CHOICE_MODE_AUTO or TOOL_CHOICE_MODE_NONE"
    if choice.WhichOneof("choice") == "function":
        field, value = "chat.tool_choice.function", Summary.of_text(choice.function)
    else:
        field = "chat.tool_choice.mode"
        if choice.mode not in pb.ToolChoiceMode.values():
            raise InvalidField(field, Summary(str(choice.mode)), allowed)
        value = Summary(pb.ToolChoiceMode.Name(choice.mode))
    raise InvalidField(field, value, f"{allowed}: this server cannot make a model call")


def _read_tools(tools_json: str) -> list[dict[str, Any]]:
    tools = read_json("chat.tools_json", tools_json, "a JSON array")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidField("chat.tools_json", Summary.of_text(tools_json), "a JSON array of objects")
    if len(tools) > MAX_TOOLS:
        raise InvalidField("chat.tools_json", Summary(f"{len(tools)} objects"), f"at most {MAX_TOOLS}")
    check_content("chat.tools_json", tools_json, tools)
    for i, tool in enumerate(tools):
        _check_tool(f"chat.tools_json[{i}]", tool)
    return tools


def _check_tool(field: str, tool: dict[str, Any]) -> None:
    """A function declaration, alone or as OpenAI wraps it: templates leave out in silence what they don't find."""
    function = tool.get("function", None if tool.get("type") == "function" else tool)
    if not isinstance(function, dict):
        raise InvalidField(f"{field}.function", Summary.of_text(str(function)), "an object with a name")
    name, parameters = function.get("name"), function.get("parameters", {})
    if not isinstance(name, str) or not name:
        raise InvalidField(f"{field}.name", Summary.of_text(str(name)), "the function's name")
    if not isinstance(parameters, dict):
        raise InvalidField(f"{field}.parameters", Summary.of_text(str(parameters)), "a JSON schema, as an object")
