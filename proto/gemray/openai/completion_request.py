"""A body of /v1/completions as a request of the protocol."""

from __future__ import annotations

from typing import Any

from gemray.openai.chat_request import Asked, read_delivery, read_n
from gemray.openai.errors import bad_field
from gemray.openai.fields import Fields, check_text
from gemray.openai.forms import read_form
from gemray.openai.lists import check_prompt_ids
from gemray.openai.sampling import read_ids, read_sampling, read_speculation
from gemray.v1 import generation_pb2 as pb

WITHOUT_EFFECT = ("user",)
MAX_LOGPROBS = 20

ONE_PROMPT = "a string, an array of token ids, or an array with one of these"


def read_completion_request(fields: Fields) -> Asked:
    """The request; raises HttpError. What the protocol states the range of is left to the server."""
    model, streams, tells_usage = read_delivery(fields)
    request = pb.GenerateStreamRequest(
        sampling=read_sampling(fields),
        speculation=read_speculation(fields),
        structured=read_form(fields),
        cache_salt=fields.text("cache_salt"),
    )
    _read_prompt(fields.required("prompt"), request)
    budget = fields.integer("max_tokens")
    if budget is not None:
        request.sampling.max_tokens = budget
    logprobs = fields.integer("logprobs", (0, MAX_LOGPROBS))
    if logprobs is not None:
        request.sampling.logprobs, request.sampling.logprob_text = logprobs, True
    read_n(fields, request.sampling)
    if fields.integer("best_of") not in (None, request.sampling.n or 1):
        raise fields.refusal("best_of", "n, or unset: all answers are given, not the best ones")
    if fields.boolean("echo"):
        request.sampling.echo = True
        if logprobs is not None:  # OpenAI tells them of all tokens that it shows
            request.sampling.prompt_logprobs = logprobs
    if fields.text("suffix"):
        raise fields.refusal("suffix", "unset: Gemma does not fill in")
    fields.end(without_effect=WITHOUT_EFFECT)
    return Asked(request, model, streams, tells_usage)


def _read_prompt(prompt: Any, request: pb.GenerateStreamRequest) -> None:
    one = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int) else prompt
    if isinstance(one, list):
        check_prompt_ids("prompt", one)
    if isinstance(one, str):
        request.text = check_text("prompt", one)
    elif isinstance(one, list) and one and all(isinstance(token_id, int) for token_id in one):
        request.token_ids.ids.extend(read_ids("prompt", one))
    else:
        raise bad_field("prompt", prompt, ONE_PROMPT)
