"""What of two answers must be equal, and how many were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from gemray.client.answers import answers_of
from gemray.v1 import generation_pb2 as pb

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


def without_speed(got: Got) -> Got:
    """Leave out what tells how an answer came about, not what it is: its id, drafts, and what was found in a cache."""
    if isinstance(got, str):
        return got
    bare = pb.GenerateResponse()
    bare.CopyFrom(got)
    bare.ClearField("request_id")
    for completion in (bare.completion, *(other.completion for other in bare.other_answers)):
        completion.ClearField("speculation")
        completion.usage.ClearField("cached_tokens")
    return bare


@dataclass
class Tally:
    """How many answers were compared, what they were, and which differed."""

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def compare(self, index: int, request: pb.GenerateRequest, alone: Got, among: Got, *, streamed: bool) -> None:
        """Hold what request `index` got among others against what it got alone, to the bit."""
        self.counts["compared"] += 1
        self.counts["streamed"] += streamed
        self.counts["refused"] += isinstance(alone, str)
        if not isinstance(alone, str):
            for part in answers_of(alone):
                self.counts["answers"] += 1
                self.counts["tokens"] += len(part.token_ids)
                self.counts["log-probabilities"] += len(part.logprobs)
                self.counts["checksums"] += sum(entry.HasField("logits_checksum") for entry in part.logprobs)
        expected, got = without_speed(alone), without_speed(among)
        if expected != got:
            self.differences.append(f"request {index}\n{request}\nalone:\n{expected}\namong others:\n{got}")

    def __str__(self) -> str:
        counted = [f"{count:,} {what}" for what, count in self.counts.items()]
        return ", ".join([*counted, f"{len(self.differences)} different"])
