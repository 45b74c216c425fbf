"""Bodies of the OpenAI endpoints as requests of the protocol, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gemray.openai.body import parse
from gemray.openai.chat_request import EFFORTS, WITHOUT_EFFECT, Asked, read_chat_request
from gemray.openai.completion_request import read_completion_request
from gemray.openai.errors import HttpError
from gemray.openai.fields import Fields
from gemray.openai.lists import MOST_ENTRIES, MOST_PROMPT_IDS
from gemray.openai.sampling import PARAMETERS, SEED_BITS
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.chat_tools import MAX_TOOLS
from gemray_cluster.server.limits import LIMITS

ASKED = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def chat(**body: Any) -> Asked:
    return read_chat_request(Fields({"messages": [ASKED], "seed": 1, **body}))


def completion(**body: Any) -> Asked:
    return read_completion_request(Fields({"prompt": "Hi", "seed": 1, **body}))


def refusal(body: dict[str, Any], read: Any = read_chat_request) -> HttpError:
    with pytest.raises(HttpError) as caught:
        read(Fields(body))
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.message.startswith(caught.value.param.removesuffix("..."))
    return caught.value


def test_parameters_are_handed_on_as_they_stand() -> None:
    values: dict[str, Any] = {"number": 0.5, "integer": 3, "boolean": False}
    asked = chat(**{parameter.name: values[parameter.kind] for parameter in PARAMETERS})
    for parameter in PARAMETERS:
        assert asked.request.sampling.HasField(parameter.name)
        assert getattr(asked.request.sampling, parameter.name) == values[parameter.kind]
    assert completion(top_k=3).request.sampling.top_k == 3


def test_what_is_unset_or_null_is_unset() -> None:
    nothing = chat(**{parameter.name: None for parameter in PARAMETERS}, stop=None, logit_bias=None, tools=None)
    for field in pb.SamplingParameters.DESCRIPTOR.fields:
        if field.name != "seed" and not field.is_repeated:
            assert not nothing.request.sampling.HasField(field.name), field.name
    assert not nothing.request.HasField("structured")
    assert (nothing.model, nothing.streams, nothing.tells_usage) == (None, False, False)
    assert not nothing.request.chat.HasField("tools_json")
    assert not nothing.request.chat.HasField("enable_thinking")


def test_a_seed_that_is_drawn_is_a_double() -> None:
    seeds = {chat(seed=None).request.sampling.seed for _ in range(50)}
    assert len(seeds) == 50
    assert max(seeds) < 2**SEED_BITS
    assert chat(seed=2**64 - 1).request.sampling.seed == 2**64 - 1


def test_sampling() -> None:
    sampling = chat(
        stop="end", logit_bias={"7": -100, "8": 1.5}, logprobs=True, top_logprobs=3, n=2, max_completion_tokens=5.0,
        stop_token_ids=[5], allowed_token_ids=[1, 2], bad_words=["no"],
    ).request.sampling  # fmt: skip
    assert (list(sampling.stop), dict(sampling.logit_bias)) == (["end"], {7: -100.0, 8: 1.5})
    assert (sampling.logprobs, sampling.logprob_text, sampling.n, sampling.max_tokens) == (3, True, 2, 5)
    assert (list(sampling.stop_token_ids), list(sampling.allowed_token_ids)) == ([5], [1, 2])
    assert list(sampling.bad_words) == ["no"]
    assert list(chat(stop=["a", "b"]).request.sampling.stop) == ["a", "b"]
    assert chat(logprobs=True).request.sampling.HasField("logprobs")
    assert not chat(logprobs=False).request.sampling.HasField("logprobs")
    assert chat(max_tokens=4, max_completion_tokens=4).request.sampling.max_tokens == 4
    assert chat(num_draft_tokens=0).request.speculation.HasField("num_draft_tokens")
    assert chat(draft_method="dflash").request.speculation.method == "dflash"
    assert not chat(draft_method=None).request.speculation.HasField("method")


def test_messages() -> None:
    messages = chat(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
            {**ASKED, "name": "Ada"},
            {
                "role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [{**CALL, "index": 0}],
                "refusal": None, "annotations": [], "audio": None, "function_call": None,
            },
            {"role": "tool", "tool_call_id": "c1", "content": "4"},
        ]
    ).request.chat.messages  # fmt: skip
    assert list(messages) == [
        pb.ChatMessage(role="system", content="Be kind."),
        pb.ChatMessage(role="user", content="Hi"),
        pb.ChatMessage(
            role="assistant",
            reasoning="hm",
            tool_calls=[pb.ToolCall(id="c1", name="f", arguments_json='{"a": 1}')],
        ),
        pb.ChatMessage(role="tool", tool_call_id="c1", content="4"),
    ]


def test_tools() -> None:
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    asked = chat(tools=[strict], parallel_tool_calls=False)
    assert json.loads(asked.request.chat.tools_json) == [strict]
    assert asked.request.chat.HasField("parallel_tool_calls")
    assert not asked.request.chat.HasField("tool_choice")
    for word, mode in (("none", 2), ("auto", 1), ("required", 3)):
        assert chat(tools=[TOOL], tool_choice=word).request.chat.tool_choice == pb.ToolChoice(mode=mode)  # type: ignore[arg-type]
    named = {"type": "function", "function": {"name": "f"}}
    assert chat(tools=[TOOL], tool_choice=named).request.chat.tool_choice == pb.ToolChoice(function="f")


def test_forms() -> None:
    schema = {"type": "object", "properties": {"é": True}}
    described = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert json.loads(chat(response_format=described).request.structured.json_schema) == schema
    assert chat(response_format={"type": "json_object"}).request.structured.json_object
    assert not chat(response_format={"type": "text"}).request.HasField("structured")
    assert chat(structured_outputs={"regex": "a+"}).request.structured.regex == "a+"
    assert completion(structured_outputs={"grammar": "start: /a/"}).request.structured.lark == "start: /a/"
    assert chat(structured_outputs={"choice": ["a", "b"]}).request.structured.choice.texts == ["a", "b"]
    assert chat(response_format={"type": "json_object"}, tools=[TOOL], tool_choice="none").request.HasField(
        "structured"
    )


def test_template() -> None:
    for effort, thinks in EFFORTS.items():
        asked = chat(reasoning_effort=effort).request.chat
        assert (asked.HasField("enable_thinking"), asked.enable_thinking) == (True, thinks)
    asked = chat(chat_template_kwargs={"enable_thinking": True, "x": 1}).request.chat
    assert (asked.enable_thinking, json.loads(asked.chat_template_kwargs_json)) == (True, {"x": 1})
    asked = chat(continue_final_message=True, add_generation_prompt=False).request.chat
    assert asked.continue_final_message


def test_delivery() -> None:
    asked = chat(model="m", stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    assert (asked.model, asked.streams, asked.tells_usage) == ("m", True, True)
    assert chat(**dict.fromkeys(WITHOUT_EFFECT, "x")).request == chat().request


def test_prompts() -> None:
    assert completion(prompt="a").request.text == "a"
    assert completion(prompt=["a"]).request.text == "a"
    assert list(completion(prompt=[2, 5]).request.token_ids.ids) == [2, 5]
    assert list(completion(prompt=[[2, 5]]).request.token_ids.ids) == [2, 5]
    assert completion(logprobs=2, echo=True, n=2, best_of=2).request.sampling == pb.SamplingParameters(
        seed=1, logprobs=2, logprob_text=True, echo=True, prompt_logprobs=2, n=2
    )
    assert not completion(echo=True).request.sampling.HasField("prompt_logprobs")


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{**ASKED, "weight": 1}]}, "messages[0].weight"),
    ({"messages": [{**ASKED, "audio": {"id": "x"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 1e999}, "temperature"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"seed": -1}, "seed"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"7": 1, "07": 2}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ({"max_completion_tokens": -4}, "max_completion_tokens"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].function"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "response_format"),
    ({"structured_outputs": {"json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
     "chat_template_kwargs.enable_thinking"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"functions": []}, "functions"),
    ({"temprature": 1}, "temprature"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=[json.dumps(body)[:60] for body, _ in BAD_CHATS])
def test_what_is_wrong_with_a_chat_is_named(body: dict[str, Any], param: str) -> None:
    assert refusal({"messages": [ASKED], **body}).param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "b"]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": 5}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": [ASKED]}, "messages"),
    ],
)
def test_what_is_wrong_with_a_completion_is_named(body: dict[str, Any], param: str) -> None:
    assert refusal({"prompt": "Hi", **body}, read_completion_request).param == param


@pytest.mark.parametrize(
    ("body", "allowed"),
    [
        ({"max_tokens": 2**31}, "an integer <= 2147483647"),
        ({"top_k": -(2**31) - 1}, "an integer >= -2147483648"),
        ({"seed": -1}, "an integer from 0 to 18446744073709551615"),
        ({"seed": 2**64}, "an integer from 0 to 18446744073709551615"),
    ],
)
def test_an_integer_beyond_its_type_is_told_the_bound_that_it_passes(body: dict[str, Any], allowed: str) -> None:
    assert refusal({"messages": [ASKED], **body}).message.endswith(f"is not allowed: {allowed}")


def test_an_unknown_field_is_not_passed_over() -> None:
    error = refusal({"messages": [ASKED], "temprature": 1})
    assert error.code == "unsupported_parameter"
    assert error.message == "temprature is not supported here; did you mean temperature?"
    assert refusal({"messages": [ASKED], "nothing_like_it": 1}).message == "nothing_like_it is not supported here"
    misplaced = {"messages": [ASKED], "stream": True, "stream_options": {"include_usages": True}}
    assert "did you mean stream_options.include_usage?" in refusal(misplaced).message


@pytest.mark.parametrize(
    ("body", "read"),
    [({"messages": [ASKED]}, read_chat_request), ({"prompt": "Hi"}, read_completion_request)],
    ids=["chat", "completion"],
)
@pytest.mark.parametrize("asked", [True, False])
def test_a_checksum_of_logits_is_offered_over_grpc_alone(body: dict[str, Any], read: Any, asked: bool) -> None:
    error = refusal({**body, "logprobs": None, "logits_checksum": asked}, read)
    assert (error.status, error.param, error.code) == (400, "logits_checksum", "unsupported_parameter")
    assert error.message == "logits_checksum is not supported here"


@pytest.mark.parametrize("name", MOST_ENTRIES)
def test_lists_are_refused_by_their_length(name: str) -> None:
    """The entries are no entries, which nobody gets to see."""
    many: Any = [None] * (MOST_ENTRIES[name] + 1)
    body: dict[str, Any] = {"messages": [ASKED], name: many}
    if name == "tool_calls":
        body = {"messages": [ASKED, {"role": "assistant", "tool_calls": many}]}
    elif name == "choice":
        body["structured_outputs"] = {"choice": body.pop("choice")}
    elif name == "logit_bias":
        body[name] = {str(index): None for index in range(len(many))}
    error = refusal(body)
    assert (error.param or "").rpartition(".")[2] == name
    assert error.message == f"{error.param} has {len(many)} entries, at most {len(many) - 1} are allowed"


def test_lengths_are_those_of_the_protocol() -> None:
    entries = {name.rpartition(".")[2]: limit.entries for name, limit in LIMITS.items()}
    stated = {**entries, "choice": entries["texts"], "tools": MAX_TOOLS}
    stated |= dict.fromkeys(("allowed_token_ids", "logit_bias"), 262_144)
    assert {name: stated[name] for name in MOST_ENTRIES} == MOST_ENTRIES


def test_a_prompt_longer_than_any_is_refused_by_its_length() -> None:
    error = refusal({"prompt": [None] * (MOST_PROMPT_IDS + 1)}, read_completion_request)
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")


def test_a_name_of_megabytes_is_cut() -> None:
    error = refusal({"messages": [ASKED], "x" * 10**6: 1})
    assert len(str(error.body)) < 3000


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"logit_bias": {"7": 1, "8": 1, "7": 2}}', 'names "7" more than once'),
        (b"\xff", "not UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "has 1e999, beyond a number's range"),
        (b'{"a": ' + b"9" * 5000 + b"}", "has an integer of 5000 digits, at most 4300 are read$"),
        (b"[" * 200_000, "nested"),
    ],
)
def test_what_is_no_json_is_told(content: bytes, told: str) -> None:
    with pytest.raises(HttpError, match=told) as caught:
        parse(content)
    assert caught.value.status == 400


def test_a_body_that_is_no_object_is_told() -> None:
    with pytest.raises(HttpError, match="body = 5 is not allowed: a JSON object"):
        Fields(parse(b"5"))
