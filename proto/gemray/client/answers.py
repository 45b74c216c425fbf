"""All answers of a response, alike."""

from __future__ import annotations

from gemray.v1 import generation_pb2 as pb


def answers_of(response: pb.GenerateResponse) -> list[pb.Answer]:
    """The answers in order: one, or `sampling.n` of them. The first one's completion is the call's, with the usage of
    all; `response.prompt_logprobs` tells of the prompt."""
    first = pb.Answer(
        token_ids=response.token_ids,
        text=response.text,
        logprobs=response.logprobs,
        completion=response.completion,
        reasoning=response.reasoning,
        tool_calls=response.tool_calls,
    )
    return [first, *response.other_answers]
