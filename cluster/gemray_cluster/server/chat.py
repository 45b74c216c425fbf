"""The chat of a request: lengths are checked before it comes here (`limits`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.chat_messages import read_messages
from gemray_cluster.server.chat_tools import DeclaredFunction, read_tools
from gemray_cluster.server.json_input import read_object
from gemray_cluster.text.control_tokens import ANSWERING_ROLES
from gemray_workers.errors import InvalidField, Summary


@dataclass(frozen=True)
class ToolChoice:
    """What a chat says of calls."""

    may_call: bool = True
    must_call: bool = False
    function: str | None = None
    """The only one that may be called."""


@dataclass(frozen=True)
class ChatInput:
    """What a chat template is given."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    """Declarations of functions, as the request has them but for what is not the template's."""
    functions: tuple[DeclaredFunction, ...]
    """The functions of the tools."""
    enable_thinking: bool | None
    parse_control_tokens: bool
    continue_final_message: bool
    variables: dict[str, Any]
    """Variables of the template, besides its own."""
    choice: ToolChoice
    takes_one_call: bool
    """Whether the answer ends behind its first call."""


_MODES = (pb.TOOL_CHOICE_MODE_AUTO, pb.TOOL_CHOICE_MODE_NONE, pb.TOOL_CHOICE_MODE_REQUIRED)


def read_chat(chat: pb.Chat) -> ChatInput:
    """Check and unpack a chat; raises InvalidField."""
    tools = read_tools(chat.tools_json) if chat.HasField("tools_json") else None
    choice = _read_tool_choice(chat)
    messages = read_messages(chat.messages)
    if chat.continue_final_message:
        _check_final(messages[-1])
    return ChatInput(
        messages=messages,
        tools=[tool.declaration for tool in tools] if tools is not None and choice.may_call else None,
        functions=tuple(tool.function for tool in tools or ()),
        enable_thinking=chat.enable_thinking if chat.HasField("enable_thinking") else None,
        parse_control_tokens=chat.parse_control_tokens,
        continue_final_message=chat.continue_final_message,
        variables=_read_variables(chat.chat_template_kwargs_json) if chat.chat_template_kwargs_json else {},
        choice=choice,
        takes_one_call=choice.function is not None
        or (chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls),
    )


def _check_final(message: dict[str, Any]) -> None:
    if message["role"] not in ANSWERING_ROLES or "tool_calls" in message:
        raise InvalidField(
            "chat.continue_final_message", True, "false, unless the last message is an assistant's without calls"
        )


def _read_variables(kwargs_json: str) -> dict[str, Any]:
    field = "chat.chat_template_kwargs_json"
    variables = read_object(field, kwargs_json)
    for name in variables:
        if not name.isidentifier() or name.startswith("_"):
            raise InvalidField(field, Summary.of_text(name), "names of variables: letters, digits and _")
    return variables


def _read_tool_choice(chat: pb.Chat) -> ToolChoice:
    """Whether the model may or must call; raises InvalidField."""
    choice = chat.tool_choice
    match choice.WhichOneof("choice"):
        case "function":
            return ToolChoice(must_call=True, function=choice.function)
        case "mode":
            if choice.mode not in _MODES:
                known = choice.mode in pb.ToolChoiceMode.values()
                value = Summary(pb.ToolChoiceMode.Name(choice.mode) if known else str(choice.mode))
                raise InvalidField("chat.tool_choice.mode", value, ", ".join(map(pb.ToolChoiceMode.Name, _MODES)))
            return ToolChoice(
                may_call=choice.mode != pb.TOOL_CHOICE_MODE_NONE,
                must_call=choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED,
            )
    return ToolChoice()
