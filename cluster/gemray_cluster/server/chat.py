"""The chat of a request: every length is checked before anything is built from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from gemray.v1 import generation_pb2 as pb
from gemray_workers.errors import InvalidField, Summary

ROLES = ("system", "developer", "user", "assistant", "model", "tool")
"""Roles of a message; templates write what they do not know as it stands, a misspelt role too."""
MAX_MESSAGES = 8192
"""Rendering takes about 20 us a message, however short."""
MAX_TOOLS_JSON_BYTES = 1 << 20
MAX_TOOLS = 1024
MAX_JSON_DEPTH = 64
"""Templates and their filters recurse."""


@dataclass(frozen=True)
class ChatInput:
    """What a chat template is given."""

    messages: list[dict[str, str]]
    tools: list[dict[str, Any]] | None
    enable_thinking: bool | None
    parse_control_tokens: bool


def read_chat(chat: pb.Chat) -> ChatInput:
    """Check and unpack a chat; raises InvalidField."""
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        raise InvalidField(
            "chat.messages", Summary(f"{len(chat.messages)} messages"), f"at least one message, at most {MAX_MESSAGES}"
        )
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidField(
                f"chat.messages[{index}].role", Summary.of_text(message.role), "one of " + ", ".join(ROLES)
            )
    return ChatInput(
        messages=[{"role": message.role, "content": message.content} for message in chat.messages],
        tools=_read_tools(chat.tools_json) if chat.HasField("tools_json") else None,
        enable_thinking=chat.enable_thinking if chat.HasField("enable_thinking") else None,
        parse_control_tokens=chat.parse_control_tokens,
    )


def _read_tools(tools_json: str) -> list[dict[str, Any]]:
    num_bytes = len(tools_json.encode())
    if num_bytes > MAX_TOOLS_JSON_BYTES:
        raise InvalidField("chat.tools_json", Summary(f"{num_bytes} bytes"), f"at most {MAX_TOOLS_JSON_BYTES}")

    def refusal(allowed: str) -> InvalidField:
        return InvalidField("chat.tools_json", Summary.of_text(tools_json), allowed)

    try:
        tools = json.loads(tools_json, parse_constant=_refuse_constant, parse_float=_finite)
    except ValueError as error:
        raise refusal(f"a JSON array ({error})") from error
    except RecursionError:
        raise refusal(f"nested at most {MAX_JSON_DEPTH} deep") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise refusal("a JSON array of objects")
    if len(tools) > MAX_TOOLS:
        raise InvalidField("chat.tools_json", Summary(f"{len(tools)} objects"), f"at most {MAX_TOOLS}")
    _check_content(tools, refusal)
    return tools


def _check_content(tools: list[Any], refusal: Callable[[str], InvalidField]) -> None:
    """Level by level, as what is nested deeply must not be walked by recursion."""
    level: list[Any] = tools
    for _ in range(MAX_JSON_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += [*value.keys(), *value.values()]
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, str) and not _is_unicode(value):
                raise refusal("text without lone surrogates (\\ud800 to \\udfff)")
        level = inner
        if not level:
            return
    raise refusal(f"nested at most {MAX_JSON_DEPTH} deep")


def _is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8; JSON's escapes can make others."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is beyond a number's range")
    return value
