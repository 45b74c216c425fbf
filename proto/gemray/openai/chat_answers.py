"""Answers of /v1/chat/completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemray.openai.answers import Answer, all_answers, call_of, call_piece_of, finish_reason_of, told_of
from gemray.openai.chunks import Chunks
from gemray.openai.head import Head
from gemray.openai.logprobs import chat_logprobs_of
from gemray.v1 import generation_pb2 as pb


def whole_chat(head: Head, answer: pb.GenerateResponse) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choices = [_choice(index, one) for index, one in enumerate(all_answers(answer))]
    return head.body("chat.completion", choices, **told_of(answer.completion))


def _choice(index: int, answer: Answer) -> dict[str, Any]:
    calls = [call_of(call) for call in answer.tool_calls]
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not answer.text else answer.text}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if calls:
        message["tool_calls"] = calls
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs_of(answer.logprobs) if answer.logprobs else None,
        **finish_reason_of(answer.completion, called=bool(calls) and not answer.tool_calls[-1].is_incomplete),
    }


class ChatChunks(Chunks):
    """The chunks of a streamed answer."""

    kind = "chat.completion.chunk"

    def _first(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def _piece(self, delta: pb.Delta) -> Iterator[dict[str, Any]]:
        added: dict[str, Any] = {}
        if delta.reasoning:
            added["reasoning_content"] = delta.reasoning
        if delta.text:
            added["content"] = delta.text
        if delta.tool_calls:
            added["tool_calls"] = [call_piece_of(piece) for piece in delta.tool_calls]
        if added or delta.logprobs:
            yield {"delta": added, "logprobs": chat_logprobs_of(delta.logprobs) if delta.logprobs else None}

    def _last(self) -> dict[str, Any]:
        return {"delta": {}}
