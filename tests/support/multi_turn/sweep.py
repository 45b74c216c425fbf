"""Serve cases with the prefix cache, hold every request against an engine without, and count what was met."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import msgspec
import torch

from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.messages import Cancel, EngineStats, SequenceDelta, Stop, Submit, ToGang
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from support.engine.speculation_rig import gang_rig, solo_rig
from support.multi_turn.case import NUM_DRAFT_TOKENS, Case, DrafterName, draw_case
from support.processes.gang import RunOnGang

TOLERANCE = 1e-9
"""Error of a log-probability: other chunks sum in another order."""
TIMEOUT_S = 1800.0
"""How long a gang may take for its cases."""


@dataclass(frozen=True)
class Answer:
    """What one request got."""

    ids: list[int]
    finish: str | None
    prompt_logprobs: list[float]


@dataclass
class Tally:
    """What was met in some cases."""

    cases: int = 0
    lag_1: int = 0
    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    """Prompt tokens that were found."""
    hits: int = 0
    """Requests with some."""
    evicted: int = 0
    preemptions: int = 0
    accepted: int = 0
    cancelled: int = 0
    differences: list[str] = field(default_factory=list)

    def merge(self, other: Tally) -> None:
        """Those of another process."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


class ChatInbox(LocalInbox):
    """Chats side by side: a turn comes when the one before has been answered."""

    def __init__(self, case: Case, submits: dict[str, Submit], cancels: dict[str, int]) -> None:
        """
        Args:
            case: the chats.
            submits: every request by its id, with the text that it begins with.
            cancels: by request, after how many tokens its client goes away.
        """
        super().__init__([])
        self._submits = submits
        self._cancels = dict(cancels)
        self._next = {chat.name: 0 for chat in case.chats}

    def poll(self, timeout_s: float) -> list[ToGang]:
        """Turns whose chat has nothing open, and cancels that are due."""
        arrived: list[ToGang] = []
        for chat, turn in self._next.items():
            submit = self._submits.get(f"{chat}.{turn}")
            if submit is not None and f"{chat}.{turn - 1}" not in self._open:
                self._open.add(submit.request_id)
                self._next[chat] += 1
                arrived.append(submit)
        for name, count in list(self._cancels.items()):
            if name in self._open and len(self.token_ids(name)) >= count:
                arrived.append(Cancel(name))
                del self._cancels[name]
        return arrived if arrived or self._open else [Stop()]

    def answer(self, name: str) -> Answer:
        """What a request got."""
        own = [delta for delta in self.deltas if delta.request_id == name]
        entries = [entry.logprob for delta in own for entry in delta.prompt_logprobs or []]
        return Answer(self.token_ids(name), own[-1].finish, entries)


def expected_answers(case: Case) -> tuple[dict[str, Submit], dict[str, Answer]]:
    """Every request and its answer, by an engine with plenty of everything and neither drafter nor cache."""
    rig = solo_rig(case.directory)
    submits: dict[str, Submit] = {}
    answers: dict[str, Answer] = {}
    texts = {chat.name: list(chat.system) for chat in case.chats}
    for turn in range(max(len(chat.turns) for chat in case.chats)):
        asked = [chat.submit(turn, texts[chat.name]) for chat in case.chats if turn < len(chat.turns)]
        inbox = LocalInbox([msgspec.structs.replace(submit, cache_salt="") for submit in asked])
        rig.engine(inbox, num_slots=8, lag=0, prefix_cache=False).run()
        for submit in asked:
            own = [delta for delta in inbox.deltas if delta.request_id == submit.request_id]
            entries = [entry.logprob for delta in own for entry in delta.prompt_logprobs or []]
            ids = inbox.token_ids(submit.request_id)
            submits[submit.request_id] = submit
            answers[submit.request_id] = Answer(ids, own[-1].finish, entries)
            texts[submit.request_id.partition(".")[0]] = [*submit.prompt_ids, *ids]
    return submits, answers


@dataclass(frozen=True)
class Job:
    """A case with what the ranks cannot know by themselves."""

    case: Case
    directory: Path
    drafter_path: Path | None
    submits: dict[str, Submit]

    @property
    def cancels(self) -> dict[str, int]:
        """By request, after how many tokens its client goes away."""
        return {
            f"{chat.name}.{i}": turn.cancel_after
            for chat in self.case.chats
            for i, turn in enumerate(chat.turns)
            if turn.cancel_after is not None
        }


@dataclass(frozen=True)
class Served:
    """What an engine with a cache gave."""

    answers: dict[str, Answer]
    finals: list[SequenceDelta]
    stats: EngineStats


def serve_jobs(comm: Communicator, jobs: Sequence[Job]) -> list[Served | None]:
    """On each rank of a gang; rank 0 has what was served."""
    torch.set_num_threads(1)
    return [_serve(comm, job) for job in jobs]


def _serve(comm: Communicator, job: Job) -> Served | None:
    case = job.case
    rig = gang_rig(
        comm,
        job.directory,
        drafter_path=job.drafter_path,
        num_draft_tokens=None if case.drafter == "none" else NUM_DRAFT_TOKENS,
    )
    inbox = ChatInbox(case, job.submits, job.cancels) if comm.rank == 0 else None
    hash_block = (lambda _before, _ids: 0) if case.collide else None
    rig.engine(inbox, prefix_cache=True, hash_block=hash_block, **case.limits(rig)).run()
    if inbox is None:
        return None
    return Served(
        answers={name: inbox.answer(name) for name in job.submits},
        finals=[inbox.last(name) for name in job.submits],
        stats=inbox.steps[-1].stats,
    )


def _add(tally: Tally, job: Job, expected: dict[str, Answer], served: Served) -> None:
    """Compare, and count what was met."""
    case, stats, finals = job.case, served.stats, served.finals
    tally.cases += 1
    tally.lag_1 += case.lag
    tally.requests += len(job.submits)
    tally.tokens += stats.generated_tokens
    tally.prompt_tokens += sum(len(submit.prompt_ids) for submit in job.submits.values())
    tally.cached += sum(delta.cached_tokens for delta in finals)
    tally.hits += sum(delta.cached_tokens > 0 for delta in finals)
    tally.evicted += stats.prefix_cache_evictions
    tally.preemptions += stats.num_preemptions
    tally.accepted += stats.speculation.accepted
    tally.cancelled += sum(delta.finish == "cancelled" for delta in finals)
    tally.differences += [
        f"seed {case.seed}, {case.drafter}, {case.shape}, lag {case.lag}: {difference}"
        for name in job.submits
        for difference in _differences(name, expected[name], served.answers[name], name in job.cancels)
    ]


def _differences(name: str, expected: Answer, got: Answer, may_be_cancelled: bool) -> Iterator[str]:
    if got.finish == "cancelled" and may_be_cancelled:
        if got.ids != expected.ids[: len(got.ids)]:
            yield f"{name} was cancelled with {got.ids}, without a cache the answer begins with {expected.ids}"
        return
    if (got.ids, got.finish) != (expected.ids, expected.finish):
        yield f"{name} got {got.ids} ({got.finish}), without a cache {expected.ids} ({expected.finish})"
    pairs = zip(got.prompt_logprobs, expected.prompt_logprobs, strict=False)
    if len(got.prompt_logprobs) != len(expected.prompt_logprobs) or any(abs(a - b) > TOLERANCE for a, b in pairs):
        yield f"{name} got other log-probabilities of its prompt"


def run_seeds(
    drafter: DrafterName, seeds: Sequence[int], *, tp: int = 1, run_on_gang: RunOnGang | None = None
) -> Tally:
    """The cases of some seeds: in this process, or on gangs of `tp` ranks."""
    torch.set_num_threads(1)
    tally, jobs, expected = Tally(), list[Job](), list[dict[str, Answer]]()
    with torch.inference_mode():
        for seed in seeds:
            case = draw_case(seed, drafter)
            submits, answers = expected_answers(case)
            jobs.append(Job(case, case.directory, case.drafter_path, submits))
            expected.append(answers)
        if run_on_gang is None:
            lead = serve_jobs(SoloCommunicator(), jobs)
        else:
            lead, *_ = run_on_gang(tp, serve_jobs, jobs, timeout_s=TIMEOUT_S)
    for job, answers, served in zip(jobs, expected, lead, strict=True):
        assert served is not None, "rank 0 has what was served"
        _add(tally, job, answers, served)
    return tally


def table(tallies: dict[DrafterName, Tally]) -> Iterator[str]:
    """A Markdown table, a row a drafter and one for all."""
    names = [f.name for f in fields(Tally)]
    total = Tally()
    for tally in tallies.values():
        total.merge(tally)
    yield "| drafter | " + " | ".join(name.replace("_", " ") for name in names) + " |"
    yield "| --- |" + " --- |" * len(names)
    for drafter, tally in [*tallies.items(), ("all", total)]:
        counts = [len(tally.differences) if name == "differences" else getattr(tally, name) for name in names]
        yield f"| {drafter} | " + " | ".join(map(str, counts)) + " |"
