"""One request, one answer, seen from outside: fixed requests, sent in several ways, must be answered by equal bits."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256

from gemray.client import RequestFailed
from gemray.v1 import generation_pb2 as pb

Ask = Callable[[pb.GenerateRequest], pb.GenerateResponse]

PASSAGE = (
    "A tide mill is a water mill driven by the rise and fall of the sea. A dam with a sluice is built across a creek; "
    "as the tide comes in, it enters the mill pond through a one way gate, and this gate closes by itself when the "
    "tide begins to fall. When the water outside is low enough, what was stored is let out to turn the wheel. Mills "
    "of this kind stood in estuaries, away from the force of the waves but near enough to the open sea for a useful "
    "range of the tide. The miller's day moved with the moon: work began an hour later each morning, and twice a day "
    "the pond gave some five hours of grinding. Where two ponds lay side by side, one was filled at high water and "
    "the other emptied at low water, and the wheel ran nearly without a pause. "
)
CHARACTERS = (20, 400, 90, 1500, 7, 230, 3000, 700)
"""Lengths of the prompts, in turn: from less than a block of keys to more than a window of most models."""


@dataclass(frozen=True)
class Run:
    """One way to send all requests."""

    name: str
    method: str
    """Who drafts: none, auto, or one of the server's drafters."""
    together: bool
    """All at one time, rather than one after the other."""
    checksums: bool = True
    """With log-probabilities and checksums of logits; without, a server runs its steps one ahead."""


@dataclass(frozen=True)
class Comparison:
    """A run beside the first one."""

    run: Run
    num_tokens: int
    other_ids: int
    """Answers with a token of another id."""
    other_logits: int
    """Answers in which a log-probability or a checksum has other bits, up to the first token of another id."""
    first: str
    """Where the first difference is; empty without any."""

    @property
    def is_equal(self) -> bool:
        """Whether there is no difference."""
        return not (self.other_ids or self.other_logits)


def requests(count: int, max_tokens: int, most_characters: int) -> list[pb.GenerateRequest]:
    """Requests of several lengths, one in two greedy; the same for every call."""
    text = PASSAGE * (max(CHARACTERS) // len(PASSAGE) + 2)
    found = []
    for index in range(count):
        length = min(CHARACTERS[index % len(CHARACTERS)], most_characters)
        begin = 37 * index % len(PASSAGE)
        sampling = pb.SamplingParameters(max_tokens=max_tokens, seed=index, ignore_eos=True)
        if index % 2 == 0:
            sampling.temperature = 0.0
        else:
            sampling.temperature, sampling.top_p = 1.0, 0.95
            sampling.top_k = 64 if index % 4 == 1 else 0
        found.append(pb.GenerateRequest(text=text[begin : begin + length], sampling=sampling))
    return found


def runs_of(drafters: Sequence[str]) -> list[Run]:
    """Ways to ask a server that has these drafters. The first is what the others are compared with."""
    runs = [Run("alone", "none", together=False), Run("alone, once more", "none", together=False)]
    runs += [Run(f"alone, {method}", method, together=False) for method in drafters]
    runs += [Run("together", "none", together=True)]
    runs += [Run(f"together, {method}", method, together=True) for method in drafters]
    return [*runs, Run("together, as served", "auto", together=True, checksums=False)]


def compare(
    ask: Ask, asked: Sequence[pb.GenerateRequest], runs: Sequence[Run], reference: Sequence[pb.GenerateResponse]
) -> Iterator[Comparison]:
    """Send all requests in each way; one comparison with the reference for each run.

    Raises:
        RequestFailed: an answer comes without the checksums that were asked for.
    """
    for run in runs:
        yield _compared(run, reference, answers_of(ask, asked, run))


def digest_of(answers: Sequence[pb.GenerateResponse]) -> str:
    """A hash in hex of ids, log-probabilities and checksums: servers that compute the same bits have the same one."""
    told = sha256()
    for answer in answers:
        told.update(struct.pack("<Q", len(answer.logprobs)))
        for entry in answer.logprobs:
            told.update(struct.pack("<IdQ", entry.token_id, entry.logprob, entry.logits_checksum))
    return told.hexdigest()


def answers_of(ask: Ask, asked: Sequence[pb.GenerateRequest], run: Run) -> list[pb.GenerateResponse]:
    """Send all requests in one way.

    Raises:
        RequestFailed: an answer comes without the checksums that were asked for.
    """
    sent = []
    for request in asked:
        copy = pb.GenerateRequest()
        copy.CopyFrom(request)
        copy.speculation.method = run.method
        copy.sampling.logits_checksum = run.checksums
        sent.append(copy)
    if run.together:
        with ThreadPoolExecutor(max_workers=len(sent)) as pool:
            found = list(pool.map(ask, sent))
    else:
        found = [ask(request) for request in sent]
    if run.checksums:
        _require_checksums(found)
    return found


def _require_checksums(answers: Sequence[pb.GenerateResponse]) -> None:
    # A server that is older than this field passes over it: nothing compared with nothing would be equal.
    for answer in answers:
        told = sum(entry.HasField("logits_checksum") for entry in answer.logprobs)
        if told != len(answer.token_ids):
            raise RequestFailed(
                f"{told} checksums of logits for {len(answer.token_ids)} tokens: "
                "a server that has sampling.logits_checksum gives as many"
            )


def _compared(run: Run, reference: Sequence[pb.GenerateResponse], found: Sequence[pb.GenerateResponse]) -> Comparison:
    other_ids = other_logits = 0
    first = ""
    for index, (expected, answer) in enumerate(zip(reference, found, strict=True)):
        ids = _first_difference(expected.token_ids, answer.token_ids)
        logits = _first_difference(_bits(expected), _bits(answer)) if run.checksums else None
        if logits is not None and ids is not None and logits > ids:
            logits = None  # behind another token everything is another text
        other_ids += ids is not None
        other_logits += logits is not None
        if not first and (ids is not None or logits is not None):
            place = min(at for at in (ids, logits) if at is not None)
            first = f"answer {index}, token {place}: {'id' if place == ids else 'logits'}"
    return Comparison(run, sum(len(answer.token_ids) for answer in found), other_ids, other_logits, first)


def _bits(answer: pb.GenerateResponse) -> list[tuple[float, int]]:
    return [(entry.logprob, entry.logits_checksum) for entry in answer.logprobs]


def _first_difference(expected: Sequence[object], found: Sequence[object]) -> int | None:
    for place, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return place
    return None if len(expected) == len(found) else min(len(expected), len(found))
