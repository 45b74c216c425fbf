"""The tools of a chat: declarations of functions, checked whether a call is required or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemray_cluster.server.chat_messages import check_function_name
from gemray_cluster.server.json_input import check_content, read_json
from gemray_cluster.text.call_schema.located import Located, shown
from gemray_cluster.text.call_schema.well_formed import check_schema
from gemray_workers.errors import InvalidField, Summary

MAX_TOOLS = 1024
_FIELD = "chat.tools_json"


@dataclass(frozen=True)
class DeclaredFunction:
    """What a call needs to know of a function."""

    name: str
    parameters: Located | None
    """A schema that is one; None: the function takes nothing."""
    is_strict: bool | None
    """What `strict` says, if it is there."""


@dataclass(frozen=True)
class Tool:
    """One of a chat's tools."""

    declaration: dict[str, Any]
    """As the template is given it, alone or as OpenAI wraps it."""
    function: DeclaredFunction


def read_tools(tools_json: str) -> list[Tool]:
    """Read the declarations of functions; raises InvalidField."""
    tools = read_json(_FIELD, tools_json, "a JSON array")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidField(_FIELD, Summary.of_text(tools_json), "a JSON array of objects")
    if len(tools) > MAX_TOOLS:
        raise InvalidField(_FIELD, Summary(f"{len(tools)} objects"), f"at most {MAX_TOOLS}")
    check_content(_FIELD, tools_json, tools)
    read: list[Tool] = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        read.append(_read_tool(f"{_FIELD}[{index}]", tool, names))
        names.add(read[-1].function.name)
    return read


def _read_tool(path: str, tool: dict[str, Any], names: set[str]) -> Tool:
    """A function declaration, alone or as OpenAI wraps it: templates leave out in silence what they don't find."""
    is_wrapped = "function" in tool or tool.get("type") is not None
    if is_wrapped and tool.get("type", "function") != "function":
        raise InvalidField(f"{path}.type", shown(tool["type"]), "function")
    function = tool.get("function") if is_wrapped else tool
    path = f"{path}.function" if is_wrapped else path
    if not isinstance(function, dict):
        raise InvalidField(path, _given(function), "an object with name, description and parameters")
    left_out = {"strict"} if function.get("parameters") is not None else {"strict", "parameters"}
    declared = {key: value for key, value in function.items() if key not in left_out}
    return Tool({**tool, "function": declared} if is_wrapped else declared, _read_function(path, function, names))


def _read_function(path: str, function: dict[str, Any], names: set[str]) -> DeclaredFunction:
    name, description, is_strict = (function.get(key) for key in ("name", "description", "strict"))
    if not isinstance(name, str):
        raise InvalidField(f"{path}.name", _given(name), "the function's name")
    check_function_name(f"{path}.name", name)
    if name in names:
        raise InvalidField(f"{path}.name", Summary.of_text(name), "a name that no tool before it has")
    if description is not None and not isinstance(description, str):
        raise InvalidField(f"{path}.description", shown(description), "a string")
    if is_strict is not None and not isinstance(is_strict, bool):
        raise InvalidField(f"{path}.strict", shown(is_strict), "true or false")
    return DeclaredFunction(name, _read_parameters(f"{path}.parameters", function.get("parameters")), is_strict)


def _read_parameters(path: str, parameters: Any) -> Located | None:
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise InvalidField(path, shown(parameters), "a JSON schema, as an object")
    located = Located(parameters, path)
    check_schema(located)
    kinds = parameters.get("type", "object")
    if "object" not in {kind.lower() for kind in (kinds if isinstance(kinds, list) else [kinds])}:
        raise InvalidField(f"{path}.type", shown(kinds), "object: a function's arguments have names")
    return located


def _given(value: object) -> Summary:
    return Summary("unset") if value is None else shown(value)
