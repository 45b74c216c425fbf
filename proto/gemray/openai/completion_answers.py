"""Answers of /v1/completions, whole and in chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from gemray.openai.answers import Answer, all_answers, finish_reason_of, told_of
from gemray.openai.chunks import Chunks
from gemray.openai.head import Head
from gemray.openai.logprobs import completion_logprobs_of
from gemray.v1 import generation_pb2 as pb


def whole_completion(head: Head, answer: pb.GenerateResponse) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choices = [_choice(index, one) for index, one in enumerate(all_answers(answer))]
    return head.body(CompletionChunks.kind, choices, **told_of(answer.completion))


def _choice(index: int, answer: Answer) -> dict[str, Any]:
    more = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    return {
        "index": index,
        "text": answer.text,
        "logprobs": completion_logprobs_of(answer.logprobs, offset=0) if answer.logprobs else None,
        **finish_reason_of(answer.completion, called=False),
        **more,
    }


class CompletionChunks(Chunks):
    """The chunks of a streamed answer."""

    kind = "text_completion"

    def __init__(self, head: Head, *, tells_usage: bool, num_answers: int = 1) -> None:
        super().__init__(head, tells_usage=tells_usage, num_answers=num_answers)
        self._offsets: Counter[int] = Counter()

    def _first(self) -> dict[str, Any] | None:
        return None

    def _piece(self, delta: pb.Delta) -> Iterator[dict[str, Any]]:
        logprobs = None
        if delta.logprobs:
            logprobs = completion_logprobs_of(delta.logprobs, offset=self._offsets[delta.index])
            self._offsets[delta.index] += sum(len(text) for text in logprobs["tokens"])
        more = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        if delta.text or more or logprobs:
            yield {"text": delta.text, "logprobs": logprobs, **more}

    def _last(self) -> dict[str, Any]:
        return {"text": ""}
