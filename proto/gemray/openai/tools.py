"""Tools of a chat and the choice among them, from OpenAI's form to the protocol's."""

from __future__ import annotations

import json
from typing import Any

from gemray.openai.errors import bad_field
from gemray.openai.fields import Fields, check_text
from gemray.v1 import generation_pb2 as pb

MODES = {
    "none": pb.TOOL_CHOICE_MODE_NONE,
    "auto": pb.TOOL_CHOICE_MODE_AUTO,
    "required": pb.TOOL_CHOICE_MODE_REQUIRED,
}


def read_tools(fields: Fields, chat: pb.Chat) -> None:
    """Put `tools`, `tool_choice` and `parallel_tool_calls` into the chat; raises HttpError."""
    tools = fields.array("tools")
    if tools:
        read = [_read_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
        chat.tools_json = check_text("tools", json.dumps(read, ensure_ascii=False))
    choice = fields.any("tool_choice")
    if choice is not None:
        chat.tool_choice.CopyFrom(_read_choice(fields, choice))
    parallel = fields.boolean("parallel_tool_calls")
    if parallel is not None:
        chat.parallel_tool_calls = parallel


def _read_tool(param: str, tool: Any) -> dict[str, Any]:
    fields = Fields(tool, param)
    fields.required("type")
    fields.text("type", among=("function",))
    declared = fields.required("function")
    if not isinstance(declared, dict):
        raise bad_field(f"{param}.function", declared, "an object with name, description and parameters")
    fields.end()
    return {"type": "function", "function": declared}


def _read_choice(fields: Fields, choice: Any) -> pb.ToolChoice:
    if isinstance(choice, str):
        if choice not in MODES:
            raise fields.refusal("tool_choice", "none, auto, required, or an object that names a function")
        return pb.ToolChoice(mode=MODES[choice])
    named = Fields(choice, "tool_choice")
    named.required("type")
    named.text("type", among=("function",))
    function = named.object("function")
    if function is None:
        raise named.refusal("function", "an object with the function's name")
    function.required("name")
    read = pb.ToolChoice(function=function.text("name"))
    function.end()
    named.end()
    return read
