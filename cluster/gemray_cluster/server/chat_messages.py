"""The messages of a chat: checked, and written as chat templates expect them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.json_input import read_object
from gemray_cluster.text.control_tokens import ANSWERING_ROLES
from gemray_cluster.text.tool_calls import NAME
from gemray_workers.errors import InvalidField, Summary

ROLES = ("system", "developer", "user", "assistant", "model", "tool")
"""Roles of a message; templates write what they do not know as it stands, a misspelt role too."""
FUNCTION_NAME_ALLOWED = "1 to 256 characters: letters, digits and _ . / : -"


def read_messages(messages: Sequence[pb.ChatMessage]) -> list[dict[str, Any]]:
    """Each message with the fields that it has; raises InvalidField."""
    if not messages:
        raise InvalidField("chat.messages", Summary("none"), "at least one message")
    called = _Called()
    return [_read(f"chat.messages[{index}]", message, called) for index, message in enumerate(messages)]


@dataclasses.dataclass
class _Called:
    """Calls of the messages read so far, by their ids. A later message may use an id again, for a call of its own."""

    functions: dict[str, str] = dataclasses.field(default_factory=dict)
    answered: set[str] = dataclasses.field(default_factory=set)

    def add(self, call_id: str, function: str) -> None:
        """Take a call, which waits for its answer."""
        self.functions.pop(call_id, None)
        self.functions[call_id] = function
        self.answered.discard(call_id)


def _read(field: str, message: pb.ChatMessage, called: _Called) -> dict[str, Any]:
    """One message; `called` gets its calls and answers."""
    if message.role not in ROLES:
        raise InvalidField(f"{field}.role", Summary.of_text(message.role), "one of " + ", ".join(ROLES))
    read: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        read |= _read_answer(field, message, called)
    else:
        _refuse(f"{field}.name", message.HasField("name"), "a tool's message")
        _refuse(f"{field}.tool_call_id", message.HasField("tool_call_id"), "a tool's message")
    if message.role in ANSWERING_ROLES:
        if message.tool_calls:
            read["tool_calls"] = _read_calls(f"{field}.tool_calls", message.tool_calls, called)
        if message.HasField("reasoning"):
            read["reasoning"] = read["reasoning_content"] = message.reasoning  # templates use either name
    else:
        _refuse(f"{field}.tool_calls", bool(message.tool_calls), "an assistant's message")
        _refuse(f"{field}.reasoning", message.HasField("reasoning"), "an assistant's message")
    return read


def _read_answer(field: str, message: pb.ChatMessage, called: _Called) -> dict[str, str]:
    """Whose answer a tool's message is: templates write the function's name, which an id stands for."""
    read: dict[str, str] = {}
    if message.HasField("tool_call_id"):
        call_id = message.tool_call_id
        if call_id not in called.functions:
            ids = ", ".join(map(repr, list(called.functions)[-4:]))
            raise InvalidField(
                f"{field}.tool_call_id",
                Summary.of_text(call_id),
                "the id of a call in a message before it" + (f", the newest are {ids}" if ids else ": there are none"),
            )
        if call_id in called.answered:
            allowed = "the id of a call that no message before it answers"
            raise InvalidField(f"{field}.tool_call_id", Summary.of_text(call_id), allowed)
        called.answered.add(call_id)
        read |= {"tool_call_id": call_id, "name": called.functions[call_id]}
    if message.HasField("name"):
        name = check_function_name(f"{field}.name", message.name)
        if read.get("name", name) != name:
            raise InvalidField(f"{field}.name", name, f"{read['name']}, the function that tool_call_id names, or unset")
        read["name"] = name
    if not read:  # a template would invent a name, and the model could not tell whose answer it is
        raise InvalidField(
            f"{field}.tool_call_id", Summary("unset"), "the id of a call in a message before it, or a name beside it"
        )
    return read


def _read_calls(field: str, calls: Sequence[pb.ToolCall], called: _Called) -> list[dict[str, Any]]:
    read = []
    ids: set[str] = set()
    for index, call in enumerate(calls):
        path = f"{field}[{index}]"
        if call.is_incomplete:
            raise InvalidField(f"{path}.is_incomplete", True, "false: only whole calls can be part of a chat")
        name = check_function_name(f"{path}.name", call.name)
        # A model may write a name twice, and clients send back what it wrote.
        arguments = read_object(f"{path}.arguments_json", call.arguments_json or "{}", names_once=False)
        if call.id in ids:  # no answer could tell which of them it is for
            raise InvalidField(f"{path}.id", Summary.of_text(call.id), "an id that no other call of the message has")
        if call.id:
            ids.add(call.id)
            called.add(call.id, name)
        read.append({"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return read


def check_function_name(field: str, name: str) -> str:
    """The name, if a function may have it."""
    if not NAME.fullmatch(name):
        raise InvalidField(field, Summary.of_text(name), FUNCTION_NAME_ALLOWED)
    return name


def _refuse(field: str, is_set: bool, owner: str) -> None:
    if is_set:
        raise InvalidField(field, Summary("set"), f"only in {owner}")
