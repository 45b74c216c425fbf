"""How long a client keeps trying, and how a call goes on behind what it has got."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from gemray.client.errors import ClientError, InvalidOption
from gemray.v1 import generation_pb2 as pb

T = TypeVar("T")

CHECKPOINT_METADATA = "x-checkpoint-hash"
"""Initial metadata by which a server tells what it serves."""


@dataclass(frozen=True)
class Retry:
    """Patience with a server that is starting, draining, rebuilding or gone."""

    first_s: float = 60.0
    """Seconds to try for the first answer, within a call's deadline: a server may be starting. 0 tries once."""
    resume_s: float = 120.0
    """Seconds to try for the rest of an answer that has begun, counted from when the server last was there."""
    delay_s: float = 0.2
    """Before the second try; it doubles with each."""
    max_delay_s: float = 5.0
    starting_s: float = 600.0
    """As resume_s, where that is shorter, while a server answers and asks to be tried again: it is starting or rebuilt.
    Nothing where resume_s is 0."""

    def __post_init__(self) -> None:
        for name in ("first_s", "resume_s", "starting_s", "delay_s", "max_delay_s"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise InvalidOption(f"retry.{name}", value, "seconds, 0 or more")


@dataclass
class Attempts:
    """The tries of one call."""

    retry: Retry
    deadline_s: float | None = None
    """Seconds that all of them may take together; None for no limit."""
    cancelled: bool = False
    """Whether the client itself has ended the call."""
    has_begun: bool = False
    _began: float = field(default_factory=time.monotonic)
    _newest: float = field(default_factory=time.monotonic)
    _heard: float = field(default_factory=time.monotonic)
    """When the server last was there: it sent a part of the answer, or asked to be tried again."""
    _failures: int = 0

    def progress(self) -> None:
        """Note that the server has sent something: patience begins anew."""
        self.has_begun, self._failures = True, 0
        self._newest = self._heard = time.monotonic()

    @property
    def timeout(self) -> float | None:
        """Seconds that the next try may take, for gRPC."""
        return None if self.deadline_s is None else max(0.001, self._began + self.deadline_s - time.monotonic())

    def delay_after(self, error: ClientError) -> float:
        """Seconds to wait before the next try; raises the error when there is to be none."""
        if error.code is not grpc.StatusCode.UNAVAILABLE:
            raise error
        longest = min(self.retry.max_delay_s, self.retry.delay_s * 2.0**self._failures)
        delay = max(longest * random.uniform(0.5, 1.0), error.retry_after_s or 0.0)
        self._failures += 1
        now = time.monotonic()
        if error.retry_after_s is not None:
            self._heard = now
        too_late = self.deadline_s is not None and now + delay >= self._began + self.deadline_s
        if too_late or now + delay > self._patient_until():
            raise error
        return delay

    def _patient_until(self) -> float:
        if not self.has_begun:
            return self._newest + self.retry.first_s
        if not self.retry.resume_s:
            return self._newest
        longest = max(self.retry.resume_s, self.retry.starting_s)
        return min(self._heard + self.retry.resume_s, self._newest + longest)


class Continuation:
    """A streamed request and what has come of it: its next try asks for the rest."""

    def __init__(self, request: pb.GenerateStreamRequest) -> None:
        """`request` stays as it is; where it has no seed, one is drawn, so that every try has the same.

        Raises InvalidOption for what is no GenerateStreamRequest.
        """
        self._request = pb.GenerateStreamRequest()
        self._request.CopyFrom(checked(request, pb.GenerateStreamRequest))
        if _draws_seed(self._request):
            self._request.sampling.seed = secrets.randbits(64)
        self._num_prompt_logprobs = 0
        self._to_skip = 0
        self._echoed: set[int] = set()
        """Answers whose echo of the prompt has come."""
        self._ended: set[int] = set()
        """Answers whose end has come."""
        self.is_whole = False
        """Whether the final message has come: what fails after it fails nothing."""
        self.is_told = False
        """Whether the try that was asked for last has said which checkpoint answers it."""

    def request(self) -> pb.GenerateStreamRequest:
        """What to send next."""
        self.is_told = False
        # A try without tokens is a whole one, so the server tells of the prompt again.
        self._to_skip = 0 if self._emitted(0) else self._num_prompt_logprobs
        return self._request

    def take(self, message: pb.GenerateStreamResponse) -> pb.GenerateStreamResponse | None:
        """Note a message, and give it less what earlier tries gave of the prompt; None for an end that one of them has
        told."""
        if message.HasField("final"):
            self.is_whole = True
            return message
        if message.HasField("answer_end"):
            is_new = message.answer_end.index not in self._ended
            self._ended.add(message.answer_end.index)
            return message if is_new else None
        self._emitted(message.delta.index).extend(message.delta.token_ids)
        self._note_echo(message.delta)
        if message.delta.prompt_logprobs:
            skipped = min(self._to_skip, len(message.delta.prompt_logprobs))
            self._to_skip -= skipped
            del message.delta.prompt_logprobs[:skipped]
            self._num_prompt_logprobs += len(message.delta.prompt_logprobs)
        return message

    def answered_by(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Note which checkpoint gave the answer's beginning, by its call's initial metadata: no other one may go on."""
        self.is_told = True
        if self._request.HasField("checkpoint_hash"):
            return
        told = next((value for key, value in metadata if key == CHECKPOINT_METADATA), "")
        if isinstance(told, str) and told:
            self._request.checkpoint_hash = told

    def _note_echo(self, delta: pb.Delta) -> None:
        """Text that comes without tokens ever (max_tokens 0) is the echo, which each try brings anew."""
        sampling = self._request.sampling
        if delta.text and sampling.HasField("max_tokens") and sampling.max_tokens == 0:
            if delta.index in self._echoed:
                delta.text = ""
            self._echoed.add(delta.index)

    def _emitted(self, index: int) -> MutableSequence[int]:
        """Where the request lists what has come of an answer."""
        if self._request.sampling.n <= 1:
            return self._request.emitted_token_ids
        by_answer = self._request.emitted_by_answer
        while len(by_answer) <= index:
            by_answer.add()
        return by_answer[index].ids


def seeded(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The request, or a copy with a seed: so every try gives the same answer.

    Raises InvalidOption for what is no GenerateRequest.
    """
    if not _draws_seed(checked(request, pb.GenerateRequest)):
        return request
    copy = pb.GenerateRequest()
    copy.CopyFrom(request)
    copy.sampling.seed = secrets.randbits(64)
    return copy


def checked(request: T, kind: type[T]) -> T:
    """The request; raises InvalidOption for one of another kind, such as a dict."""
    if not isinstance(request, kind):
        raise InvalidOption(
            "request", type(request).__name__, f"a gemray.v1.generation_pb2.{kind.__name__}, made with its fields"
        )
    return request


def _draws_seed(request: pb.GenerateRequest | pb.GenerateStreamRequest) -> bool:
    """Whether a seed is to be drawn: one that goes on behind emitted ids needs theirs, and the server says so."""
    goes_on = request.emitted_token_ids or any(answer.ids for answer in request.emitted_by_answer)
    return not request.sampling.HasField("seed") and not goes_on
