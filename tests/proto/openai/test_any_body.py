"""Bodies at random: each is a request of the protocol, or an error that is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from gemray.openai.body import parse
from gemray.openai.chat_request import read_chat_request
from gemray.openai.completion_request import read_completion_request
from gemray.openai.errors import HttpError
from gemray.openai.fields import Fields

texts = st.text(st.characters(exclude_categories=()), max_size=4)  # single surrogates, too
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, 0.5, 1e308, -0.0, "", "none", "auto", "required", "text", "function", "json_object"]),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
)
NAMES = (
    "messages", "role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id", "tools",
    "tool_choice", "response_format", "json_schema", "schema", "structured_outputs", "regex", "choice", "grammar",
    "stop", "logit_bias", "logprobs", "top_logprobs", "n", "best_of", "seed", "temperature", "top_k", "max_tokens",
    "prompt", "stream", "stream_options", "include_usage", "chat_template_kwargs", "enable_thinking",
    "reasoning_effort", "stop_token_ids", "allowed_token_ids", "bad_words", "echo", "num_draft_tokens", "model",
    "draft_method",
)  # fmt: skip
names = st.one_of(st.sampled_from(NAMES), texts)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=4)),
    max_leaves=8,
)
bodies = st.dictionaries(names, values, max_size=5)


def outcome(read: Callable[[], Any]) -> tuple[Any, HttpError | None]:
    """What was read, or the error, which can be told."""
    try:
        return read(), None
    except HttpError as told:
        error = told
    assert error.status == 400
    assert len(JSONResponse(error.body).body) < 8192
    return None, error


@pytest.mark.parametrize(
    ("read", "needed"),
    [
        (read_chat_request, {"messages": [{"role": "user", "content": "Hi"}]}),
        (read_completion_request, {"prompt": "Hi"}),
    ],
)
@settings(max_examples=150)
@given(body=bodies, has_all=st.booleans())
def test_any_object_is_read_or_refused(read: Any, needed: dict[str, Any], body: dict[str, Any], has_all: bool) -> None:
    sent = {**body, **needed} if has_all else body
    asked, error = outcome(lambda: read(Fields(parse(json.dumps(sent).encode()))))
    if error is None:
        asked.request.SerializeToString()
    else:
        assert error.param is not None


@settings(max_examples=200)
@given(st.one_of(st.binary(max_size=30), values.map(lambda value: json.dumps(value).encode())))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    outcome(lambda: parse(content))
