"""Answers of /v1/completions, whole and in chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from gemray.openai.answers import Answer, all_answers, finish_reason_of, told_of
from gemray.openai.chunks import Chunks
from gemray.openai.head import Head
from gemray.openai.logprobs import completion_logprobs_of
from gemray.v1 import generation_pb2 as pb


def whole_completion(head: Head, answer: pb.GenerateResponse) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choices = [_choice(index, one, answer.prompt_logprobs) for index, one in enumerate(all_answers(answer))]
    return head.body(CompletionChunks.kind, choices, **told_of(answer.completion))


def _choice(index: int, answer: Answer, of_prompt: Sequence[pb.TokenLogprob]) -> dict[str, Any]:
    more = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    logprobs = [*of_prompt, *answer.logprobs]
    return {
        "index": index,
        "text": answer.text,
        "logprobs": completion_logprobs_of(logprobs, begins_prompt=bool(of_prompt)) if logprobs else None,
        **finish_reason_of(answer.completion, called=False),
        **more,
    }


class CompletionChunks(Chunks):
    """The chunks of a streamed answer."""

    kind = "text_completion"

    def __init__(self, head: Head, *, tells_usage: bool, num_answers: int = 1) -> None:
        super().__init__(head, tells_usage=tells_usage, num_answers=num_answers)
        self._offsets: Counter[int] = Counter()
        self._has_prompt = False

    def _first(self) -> dict[str, Any] | None:
        return None

    def _piece(self, delta: pb.Delta) -> Iterator[dict[str, Any]]:
        logprobs = None
        told = [*delta.prompt_logprobs, *delta.logprobs]  # the prompt's come with the first answer alone
        if told:
            begins = bool(delta.prompt_logprobs) and not self._has_prompt
            self._has_prompt |= begins
            logprobs = completion_logprobs_of(told, offset=self._offsets[delta.index], begins_prompt=begins)
            self._offsets[delta.index] += sum(len(text) for text in logprobs["tokens"])
        more = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        if delta.text or more or logprobs:
            yield {"text": delta.text, "logprobs": logprobs, **more}

    def _last(self) -> dict[str, Any]:
        return {"text": ""}
