"""A drawn request as OpenAI's HTTP API asks it, and what that tells of an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

from gemray.client.answers import answers_of
from gemray.v1 import generation_pb2 as pb
from support.waiting import HANG_S

SCALARS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "n",
)  # fmt: skip
LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
MODES = {pb.TOOL_CHOICE_MODE_REQUIRED: "required", pb.TOOL_CHOICE_MODE_NONE: "none"}
LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity."""


@dataclass(frozen=True)
class Told:
    """What HTTP tells of one answer."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    """Names and arguments."""
    finish: str
    logprobs: tuple[float, ...]


HttpGot = tuple[tuple[Told, ...], tuple[int, int]] | str
"""All answers, with tokens of prompt and output; or that the request was refused."""
REFUSED = "refused"


def told_over_http(answer: pb.GenerateResponse | str) -> HttpGot:
    """What HTTP would tell of an answer over gRPC."""
    if isinstance(answer, str):
        return REFUSED
    usage = answer.completion.usage
    return tuple(map(_told, answers_of(answer))), (usage.prompt_tokens, usage.completion_tokens)


def _told(part: pb.Answer) -> Told:
    finish = "length" if part.completion.finish_reason == pb.FINISH_REASON_LENGTH else "stop"
    return Told(
        part.text,
        part.reasoning,
        tuple((call.name, call.arguments_json) for call in part.tool_calls),
        "tool_calls" if part.tool_calls and finish == "stop" else finish,
        tuple(max(entry.logprob, LEAST_LOGPROB) for entry in part.logprobs),
    )


def can_ask_over_http(request: pb.GenerateRequest) -> bool:
    """Whether HTTP tells as much of the answer: what it echoes has log-probabilities of its own."""
    return not request.sampling.echo


async def ask_over_http(client: httpx.AsyncClient, request: pb.GenerateRequest) -> HttpGot:
    """Send the request, without what HTTP does not tell and no token depends on, as checksums."""
    is_chat = request.WhichOneof("input") == "chat"
    path, body = "/v1/chat/completions" if is_chat else "/v1/completions", _body(request)
    response = await client.post(path, json=body, timeout=HANG_S)
    content = response.json()
    if response.status_code != httpx.codes.OK:
        return REFUSED
    usage = content["usage"]
    choices = sorted(content["choices"], key=lambda choice: int(choice["index"]))
    tell = _told_of_chat if is_chat else _told_of_text
    return tuple(tell(choice) for choice in choices), (usage["prompt_tokens"], usage["completion_tokens"])


def _told_of_chat(choice: dict[str, Any]) -> Told:
    message, logprobs = choice["message"], choice.get("logprobs")
    return Told(
        message.get("content") or "",
        message.get("reasoning_content") or "",
        tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()),
        choice["finish_reason"],
        tuple(entry["logprob"] for entry in logprobs["content"]) if logprobs else (),
    )


def _told_of_text(choice: dict[str, Any]) -> Told:
    logprobs = choice.get("logprobs")
    return Told(choice["text"], "", (), choice["finish_reason"], tuple(logprobs["token_logprobs"]) if logprobs else ())


def _body(request: pb.GenerateRequest) -> dict[str, Any]:
    sampling = request.sampling
    body: dict[str, Any] = {name: getattr(sampling, name) for name in SCALARS if sampling.HasField(name)}
    body |= {name: list(found) for name in LISTS if (found := getattr(sampling, name))}
    if sampling.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if request.speculation.HasField("num_draft_tokens"):
        body["num_draft_tokens"] = request.speculation.num_draft_tokens
    match request.structured.WhichOneof("form"):
        case "json_schema":
            schema = {"name": "form", "schema": json.loads(request.structured.json_schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        case "regex":
            body["structured_outputs"] = {"regex": request.structured.regex}
    if request.WhichOneof("input") == "chat":
        return body | _chat(request.chat, sampling)
    prompt = request.text if request.WhichOneof("input") == "text" else list(request.token_ids.ids)
    return body | {"prompt": prompt} | ({"logprobs": sampling.logprobs} if sampling.HasField("logprobs") else {})


def _chat(chat: pb.Chat, sampling: pb.SamplingParameters) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": said.role, "content": said.content} for said in chat.messages]}
    if sampling.HasField("logprobs"):
        body |= {"logprobs": True, "top_logprobs": sampling.logprobs}
    if chat.HasField("enable_thinking"):
        body["chat_template_kwargs"] = {"enable_thinking": chat.enable_thinking}
    if chat.continue_final_message:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if chat.tools_json:
        body["tools"] = json.loads(chat.tools_json)
    match chat.tool_choice.WhichOneof("choice"):
        case "function":
            body["tool_choice"] = {"type": "function", "function": {"name": chat.tool_choice.function}}
        case "mode":
            body["tool_choice"] = MODES[chat.tool_choice.mode]
    if chat.HasField("parallel_tool_calls"):
        body["parallel_tool_calls"] = chat.parallel_tool_calls
    return body
