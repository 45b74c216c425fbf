"""What an answer of the protocol is called over HTTP; the parts that whole answers and streams share."""

from __future__ import annotations

from typing import Any

from gemray.v1 import generation_pb2 as pb

Answer = pb.GenerateResponse | pb.Answer
"""One answer; of the first of several, the response itself."""

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP_TOKEN: "stop",
    pb.FINISH_REASON_STOP_STRING: "stop",
    pb.FINISH_REASON_FORM_COMPLETE: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALL: "tool_calls",
}


def all_answers(response: pb.GenerateResponse) -> list[Answer]:
    """The answers to a request, in order."""
    return [response, *response.other_answers]


def finish_reason_of(completion: pb.Completion, *, called: bool) -> dict[str, Any]:
    """OpenAI's finish_reason, and the stop string or token as vLLM tells it.

    `called` says whether the answer holds calls, all of them whole: a form or a stop string may have ended it then.
    """
    reason, stop = _FINISH_REASONS[completion.finish_reason], completion.WhichOneof("matched_stop")
    return {
        "finish_reason": "tool_calls" if called and reason == "stop" else reason,
        "stop_reason": None if stop is None else getattr(completion, stop),
    }


def told_of(completion: pb.Completion) -> dict[str, Any]:
    """What a whole answer has beside its choices."""
    return {"usage": usage_of(completion.usage), "gemray": statistics_of(completion)}


def usage_of(usage: pb.Usage) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def statistics_of(completion: pb.Completion) -> dict[str, Any]:
    """What OpenAI's API has no place for: the seed that was used, and what speculation did."""
    told: dict[str, Any] = {"seed": completion.seed}
    if completion.HasField("speculation"):
        counters = completion.speculation
        told["speculation"] = {
            "method": counters.method,
            "rounds": counters.rounds,
            "drafted": counters.drafted,
            "accepted": counters.accepted,
            "accepted_per_position": list(counters.accepted_per_position),
        }
    return told


def call_of(call: pb.ToolCall) -> dict[str, Any]:
    """A call, as a whole answer and a message have it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


def call_piece_of(piece: pb.ToolCallDelta) -> dict[str, Any]:
    """What was added to a call."""
    told: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.arguments_json}}
    if piece.HasField("name"):
        told |= {"id": piece.id, "type": "function"}
        told["function"]["name"] = piece.name
    return told
