"""A body of /v1/chat/completions as a request of the protocol."""

from __future__ import annotations

import json
from dataclasses import dataclass

from gemray.openai.fields import Fields, check_text
from gemray.openai.forms import read_form
from gemray.openai.messages import read_messages
from gemray.openai.sampling import read_sampling, read_speculation
from gemray.openai.tools import read_tools
from gemray.v1 import generation_pb2 as pb

WITHOUT_EFFECT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prediction",
    "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
)  # fmt: skip
"""Fields that change no answer here: they are taken and forgotten."""

EFFORTS = {"none": False, "minimal": True, "low": True, "medium": True, "high": True, "xhigh": True, "max": True}
"""Gemma thinks or does not: it knows no degrees."""


@dataclass(frozen=True)
class Asked:
    """What a body asks for."""

    request: pb.GenerateStreamRequest
    """Without an id; the unary call takes the same fields."""
    model: str | None
    streams: bool
    tells_usage: bool
    """Whether a stream ends with its usage."""


def read_chat_request(fields: Fields) -> Asked:
    """The request; raises HttpError. What the protocol states the range of is left to the server."""
    model, streams, tells_usage = read_delivery(fields)
    chat = pb.Chat(messages=read_messages(fields.required("messages")))
    read_tools(fields, chat)
    _read_template(fields, chat)
    sampling = read_sampling(fields)
    if fields.boolean("echo"):
        sampling.echo = True
    read_n(fields, sampling)
    _read_budget(fields, sampling)
    _read_logprobs(fields, sampling)
    form = read_form(fields)
    if form is not None and chat.tools_json and chat.tool_choice.mode != pb.TOOL_CHOICE_MODE_NONE:
        raise fields.refusal("response_format", 'unset beside tools, unless tool_choice is "none"')
    asked = pb.GenerateStreamRequest(
        chat=chat,
        sampling=sampling,
        speculation=read_speculation(fields),
        structured=form,
        cache_salt=fields.text("cache_salt"),
    )
    fields.end(without_effect=WITHOUT_EFFECT)
    return Asked(asked, model, streams, tells_usage)


def read_delivery(fields: Fields) -> tuple[str | None, bool, bool]:
    """(model, whether to stream, whether a stream tells its usage); raises HttpError."""
    model, streams = fields.text("model"), fields.boolean("stream") or False
    options = fields.object("stream_options")
    if options is None:
        return model, streams, False
    if not streams:
        raise fields.refusal("stream_options", "unset without stream")
    tells_usage = options.boolean("include_usage") or False
    options.end(without_effect=("include_obfuscation",))
    return model, streams, tells_usage


def read_n(fields: Fields, sampling: pb.SamplingParameters) -> None:
    """How many answers the request has; raises HttpError."""
    count = fields.integer("n")
    if count is not None:
        sampling.n = count


def _read_budget(fields: Fields, sampling: pb.SamplingParameters) -> None:
    """OpenAI has renamed max_tokens; either is taken, and both where they agree."""
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise fields.refusal("max_tokens", f"unset beside max_completion_tokens = {new}")
    if new is not None and new < 0:  # the server would say so of max_tokens
        raise fields.refusal("max_completion_tokens", "an integer >= 0")
    budget = old if new is None else new
    if budget is not None:
        sampling.max_tokens = budget


def _read_logprobs(fields: Fields, sampling: pb.SamplingParameters) -> None:
    asked, top = fields.boolean("logprobs"), fields.integer("top_logprobs")
    if asked:
        sampling.logprobs, sampling.logprob_text = top or 0, True
    elif top:
        raise fields.refusal("top_logprobs", "unset without logprobs = true")


def _read_template(fields: Fields, chat: pb.Chat) -> None:
    """What the chat template is given beside messages and tools."""
    effort = fields.text("reasoning_effort", among=tuple(EFFORTS))
    if effort is not None:
        chat.enable_thinking = EFFORTS[effort]
    variables = fields.any("chat_template_kwargs")
    if variables is not None:
        rest = Fields(variables, "chat_template_kwargs")
        thinking = rest.boolean("enable_thinking")
        if thinking is not None and effort is not None and thinking != EFFORTS[effort]:
            raise rest.refusal("enable_thinking", f"unset beside reasoning_effort = {effort}")
        if thinking is not None:
            chat.enable_thinking = thinking
        others = {name: value for name, value in variables.items() if name != "enable_thinking"}
        if others:
            text = json.dumps(others, ensure_ascii=False)
            chat.chat_template_kwargs_json = check_text("chat_template_kwargs", text)
    continues = fields.boolean("continue_final_message") or False
    if fields.boolean("add_generation_prompt") is continues:
        allowed = f"the opposite of continue_final_message, which is {str(continues).lower()}, or unset"
        raise fields.refusal("add_generation_prompt", allowed)
    chat.continue_final_message = continues
