"""What of two answers must be equal, and how many were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from gemray.client.answers import answers_of
from gemray.v1 import generation_pb2 as pb
from support.equal_answers.over_http import HttpGot, told_over_http

Got = pb.GenerateResponse | str
"""An answer, or a status with what it says."""


def refusal(error: grpc.RpcError) -> str:
    """The status that a call ended with instead of an answer."""
    return f"{error.code().name}: {error.details()}"


def joined(messages: Sequence[pb.GenerateStreamResponse]) -> pb.GenerateResponse:
    """The unary answer that a stream's messages add up to."""
    whole = pb.GenerateResponse()
    parts: dict[int, pb.GenerateResponse | pb.Answer] = {0: whole}
    for message in messages:
        match message.WhichOneof("event"):
            case "delta":
                part = _part(whole, parts, message.delta.index)
                part.token_ids.extend(message.delta.token_ids)
                part.text += message.delta.text
                part.reasoning += message.delta.reasoning
                part.logprobs.extend(message.delta.logprobs)
                for piece in message.delta.tool_calls:
                    _add_to_calls(part, piece)
                whole.prompt_logprobs.extend(message.delta.prompt_logprobs)
            case "answer_end":
                _part(whole, parts, message.answer_end.index).completion.CopyFrom(message.answer_end.completion)
            case "final":
                whole.completion.CopyFrom(message.final)
    return whole


def _part(
    whole: pb.GenerateResponse, parts: dict[int, pb.GenerateResponse | pb.Answer], index: int
) -> pb.GenerateResponse | pb.Answer:
    while index not in parts:  # answers may begin in any order; they are told in theirs
        parts[len(parts)] = whole.other_answers.add()
    return parts[index]


def _add_to_calls(part: pb.GenerateResponse | pb.Answer, piece: pb.ToolCallDelta) -> None:
    if piece.index == len(part.tool_calls):
        part.tool_calls.add()
    call = part.tool_calls[piece.index]
    call.id += piece.id
    call.name += piece.name
    call.arguments_json += piece.arguments_json
    call.is_incomplete = not piece.is_complete


def without_speed(got: Got) -> Got:
    """Leave out what tells how an answer came about, not what it is: its id and its calls', drafts, cached tokens."""
    if isinstance(got, str):
        return got
    bare = pb.GenerateResponse()
    bare.CopyFrom(got)
    bare.ClearField("request_id")
    answers: list[pb.GenerateResponse | pb.Answer] = [bare, *bare.other_answers]
    for answer in answers:
        answer.completion.ClearField("speculation")
        answer.completion.usage.ClearField("cached_tokens")
        for call in answer.tool_calls:
            call.ClearField("id")
    return bare


@dataclass
class Tally:
    """How many answers were compared, what they were, and which differed."""

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def compare(self, index: int, request: pb.GenerateRequest, alone: Got, among: Got, *, how: str) -> None:
        """Hold what request `index` got among others, asked `how`, against what it got alone, to the bit."""
        self._count(alone, how)
        self._hold(index, request, without_speed(alone), without_speed(among), how)

    def compare_http(self, index: int, request: pb.GenerateRequest, alone: Got, among: HttpGot) -> None:
        """The same with what came over HTTP, as far as HTTP tells it."""
        self._count(alone, "over HTTP")
        self._hold(index, request, told_over_http(alone), among, "over HTTP")

    def _count(self, alone: Got, how: str) -> None:
        self.counts["compared"] += 1
        self.counts[how] += 1
        self.counts["refused"] += isinstance(alone, str)
        if not isinstance(alone, str):
            for part in answers_of(alone):
                self.counts["answers"] += 1
                self.counts["tokens"] += len(part.token_ids)
                self.counts["tool calls"] += len(part.tool_calls)
                self.counts["log-probabilities"] += len(part.logprobs)
                self.counts["checksums"] += sum(entry.HasField("logits_checksum") for entry in part.logprobs)

    def _hold(self, index: int, request: pb.GenerateRequest, expected: object, got: object, how: str) -> None:
        if expected != got:
            self.differences.append(f"request {index}, {how}\n{request}\nalone:\n{expected}\namong others:\n{got}")

    def __str__(self) -> str:
        counted = [f"{count:,} {what}" for what, count in self.counts.items()]
        return ", ".join([*counted, f"{len(self.differences)} different"])
