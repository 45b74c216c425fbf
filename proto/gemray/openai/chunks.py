"""Chunks of a streamed answer, as far as both endpoints have them alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from gemray.openai.answers import finish_reason_of, statistics_of, usage_of
from gemray.openai.head import Head
from gemray.v1 import generation_pb2 as pb


class Chunks(ABC):
    """The chunks of one request, which may have several answers."""

    kind: ClassVar[str]
    """What `object` says."""

    def __init__(self, head: Head, *, tells_usage: bool, num_answers: int = 1) -> None:
        self._head = head
        self._tells_usage = tells_usage
        self._num_answers = num_answers
        self._called: dict[int, bool] = {}
        """Whether the newest call of an answer is whole."""

    def begin(self) -> Iterator[dict[str, Any]]:
        """What comes before the first token."""
        first = self._first()
        if first is not None:
            for index in range(self._num_answers):
                yield self._chunk(index, first)

    def of(self, message: pb.GenerateStreamResponse) -> Iterator[dict[str, Any]]:
        """What a message adds; nothing where its text still waits for what follows."""
        match message.WhichOneof("event"):
            case "delta":
                if message.delta.tool_calls:
                    self._called[message.delta.index] = message.delta.tool_calls[-1].is_complete
                for piece in self._piece(message.delta):
                    yield self._chunk(message.delta.index, piece)
            case "answer_end":
                yield self._end(message.answer_end.index, message.answer_end.completion)
            case "final":
                yield from self._final(message.final)

    def _final(self, completion: pb.Completion) -> Iterator[dict[str, Any]]:
        """With several answers each has ended before; what is left to tell is of all of them."""
        told = {"gemray": statistics_of(completion)}
        if self._num_answers == 1:
            yield self._end(0, completion) | told
        if self._tells_usage:
            yield self._head.body(self.kind, [], usage=usage_of(completion.usage), **told)

    def _end(self, index: int, completion: pb.Completion) -> dict[str, Any]:
        reason = finish_reason_of(completion, called=self._called.get(index, False))
        return self._chunk(index, self._last() | reason)

    def _chunk(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        whole = {"index": index, "logprobs": None, "finish_reason": None, **choice}
        return self._head.body(self.kind, [whole], **({"usage": None} if self._tells_usage else {}))

    @abstractmethod
    def _first(self) -> dict[str, Any] | None:
        """What an answer's first chunk has before the first token; None for no such chunk."""

    @abstractmethod
    def _piece(self, delta: pb.Delta) -> Iterator[dict[str, Any]]:
        """What a delta adds, at most one."""

    @abstractmethod
    def _last(self) -> dict[str, Any]:
        """What an answer's last chunk has beside its reason."""
