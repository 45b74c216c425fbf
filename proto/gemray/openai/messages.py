"""Messages of a chat, from OpenAI's form to the protocol's."""

from __future__ import annotations

from typing import Any

from gemray.openai.errors import HttpError, bad_field
from gemray.openai.fields import Fields, check_text
from gemray.openai.lists import check_length
from gemray.v1 import generation_pb2 as pb

WITHOUT_EFFECT = ("annotations", "refusal", "audio", "function_call")
"""What answers of OpenAI's have beside the content, mostly null or empty: it is part of messages that are sent back."""

TEXT_ONLY = "text: the served model is given no images, audio or files"


def read_messages(messages: object) -> list[pb.ChatMessage]:
    """Each message; raises HttpError."""
    if not isinstance(messages, list):
        raise bad_field("messages", messages, "an array of messages")
    check_length("messages", "messages", messages)
    return [_read(Fields(message, f"messages[{index}]")) for index, message in enumerate(messages)]


def _read(fields: Fields) -> pb.ChatMessage:
    fields.required("role")
    role, name = fields.text("role"), fields.text("name")
    message = pb.ChatMessage(
        role=role,
        content=_read_content(fields),
        name=name if role == "tool" else None,  # Gemma's template has no place for the names of others
        tool_call_id=fields.text("tool_call_id"),
        reasoning=_read_reasoning(fields),
    )
    for index, call in enumerate(fields.array("tool_calls") or []):
        message.tool_calls.append(_read_call(Fields(call, fields.name_of(f"tool_calls[{index}]"))))
    if fields.any("content") is None and not message.tool_calls and message.role not in ("assistant", "model"):
        raise HttpError(400, f"{fields.name_of('content')} is missing", param=fields.name_of("content"))
    for name in WITHOUT_EFFECT:
        if fields.any(name):
            raise fields.refusal(name, "null")
    fields.end()
    return message


def _read_content(fields: Fields) -> str:
    """The text; parts of text are put together as Gemma's template would."""
    content = fields.any("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return check_text(fields.name_of("content"), content)
    if not isinstance(content, list):
        raise fields.refusal("content", "a string or an array of parts")
    return "".join(_read_part(f"{fields.name_of('content')}[{index}]", part) for index, part in enumerate(content))


def _read_part(param: str, part: Any) -> str:
    fields = Fields(part, param)
    if fields.required("type") != "text":
        raise fields.refusal("type", TEXT_ONLY)
    fields.required("text")
    text = fields.text("text")
    fields.end()
    return text or ""


def _read_reasoning(fields: Fields) -> str | None:
    """What an earlier answer gave as `reasoning_content`; newer vLLM calls it `reasoning`."""
    either, other = fields.text("reasoning_content"), fields.text("reasoning")
    return other if either is None else either


def _read_call(fields: Fields) -> pb.ToolCall:
    fields.text("type", among=("function",))
    function = fields.object("function")
    if function is None:
        raise fields.refusal("function", "an object with name and arguments")
    function.required("name")
    call = pb.ToolCall(id=fields.text("id"), name=function.text("name"), arguments_json=function.text("arguments"))
    function.end()
    fields.end(without_effect=("index",))
    return call
