"""Names of fields: what the server calls by the protocol's name is told by the one that the HTTP client has used."""

from __future__ import annotations

import re

_RENAMED = (
    (r"chat\.tools_json", "tools"),
    (r"chat\.tool_choice\.function", "tool_choice.function.name"),
    (r"chat\.tool_choice(\.mode)?", "tool_choice"),
    (r"chat\.chat_template_kwargs_json", "chat_template_kwargs"),
    (r"(chat\.messages\[\d+\]\.tool_calls\[\d+\])\.name", r"\1.function.name"),
    (r"(chat\.messages\[\d+\]\.tool_calls\[\d+\])\.arguments_json", r"\1.function.arguments"),
    (r"(chat\.messages\[\d+\])\.reasoning", r"\1.reasoning_content"),
    (r"chat$", "messages"),
    (r"chat\.", ""),
    (r"sampling\.logprobs", "top_logprobs"),
    (r"sampling\.", ""),
    (r"speculation\.method", "draft_method"),
    (r"speculation\.", ""),
    (r"structured\.json_schema", "response_format.json_schema.schema"),
    (r"structured\.json_object", "response_format"),
    (r"structured\.(regex|choice)(\.texts)?", r"structured_outputs.\1"),
    (r"structured\.lark", "structured_outputs.grammar"),
    (r"structured$", "response_format"),
    (r"(text|token_ids(\.ids)?)$", "prompt"),
)
"""Patterns of the beginning of a name; the first that fits, then the next on what it gave."""


def http_name(field: str) -> str:
    """The HTTP name of a field of the protocol; its own where both are the same."""
    for pattern, name in _RENAMED:
        field = re.sub("^" + pattern, name, field)
    return field


def http_words(message: str) -> str:
    """A sentence about a tool choice, with the HTTP values in place of the protocol's: ``required``, ``auto``."""
    return re.sub(r"\bTOOL_CHOICE_MODE_([A-Z]+)\b", lambda found: found[1].lower(), message)
