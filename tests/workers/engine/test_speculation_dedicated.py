"""A DFlash drafter on a rank of its own: the same ids, and the same drafts as inside the target's ranks.

Drafts are compared round by round with those of a colocated drafter, under every acceptance: the trained family
accepts by itself, and for random weights a script's drafts are verified in place of two thirds of the drafter's own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import pytest
import torch

from gemray_workers.config import EngineConfig
from gemray_workers.embedded import embedded_path
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.errors import InvalidField
from gemray_workers.messages import SpeculationCounters, Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.torch_communicator import TorchCommunicator
from gemray_workers.rank.drafter_rank import DrafterRank
from gemray_workers.rank.target_rank import EngineRank
from support.checkpoints.tiny import Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import Run, collect, engine_config, run_engine
from support.engine.held_out_requests import held_out_requests
from support.engine.padded_cycle import PaddedCycle
from support.engine.scarce_memory import least_memory
from support.engine.scripted_drafters import Round, ScriptedDrafter, Texts, plain_texts
from support.engine.watched_requests import every_acceptance
from support.processes.gang import RunOnGang

from .test_engine_ids import mixed_requests

CPU = torch.device("cpu")
Kind = Shape | Literal["trained"]
KINDS: dict[int, tuple[Kind, ...]] = {1: ("trained", "31B", "26B-A4B"), 2: ("trained", "26B-A4B"), 4: ("31B",)}
"""What is served, by TP size."""
LONGEST = 80
"""Tokens of the longest of the mixed requests."""


@dataclass(frozen=True)
class Job:
    """One engine's settings and requests."""

    config: EngineConfig
    submits: list[Submit]
    texts: Texts | None = None
    """What plain decoding gives, for scripts; None leaves the drafter's own drafts as they are."""

    def watched(self, drafter: Any) -> ScriptedDrafter:
        """The drafter with a script's drafts verified instead of its own in two of three rounds, or with none."""
        script = None if self.texts is None else every_acceptance(self.texts)

        def override(request_id: str, position: int, count: int) -> list[int] | None:
            return script(request_id, position, count) if script is not None and position % 3 else None

        return ScriptedDrafter(override, drafter)


@dataclass(frozen=True)
class Outcome:
    """What an engine gave its requests, and what its drafter proposed."""

    ids: dict[str, list[int]]
    counters: dict[str, SpeculationCounters | None]
    preemptions: int

    @classmethod
    def of(cls, run: Run) -> Outcome:
        return cls(run.ids, {name: result.last.speculation for name, result in run.results.items()}, run.preemptions)

    def total(self, field: str) -> int:
        """The counter `field`, added over all requests."""
        return sum(getattr(counter, field) for counter in self.counters.values() if counter is not None)


def tiny_job(shape: Shape, tp: int, placement: str, *, is_memory_scarce: bool = False, lag: int = 1) -> Job:
    target = tiny_checkpoint(shape)
    config = engine_config(
        target,
        tensor_parallel_size=tp,
        drafter_path=str(tiny_dflash(target)),
        drafter_placement=placement,
        max_model_len=LONGEST,
        num_draft_tokens=5,
        prefill_chunk=9,
        lag=lag,
    )
    if is_memory_scarce:
        config = replace(config, kv_memory_bytes=least_memory(config))
    return Job(config, tiny_requests(), plain_texts(tiny_requests(), plain_ids(shape)))


def tiny_requests() -> list[Submit]:
    return mixed_requests(seed=30, max_tokens=40)


def trained_job(tp: int, placement: str, lag: int) -> Job:
    """The trained family, whose drafts are accepted as real ones are; half of the requests sample."""
    config = engine_config(
        embedded_path("gemray-tiny"),
        tensor_parallel_size=tp,
        drafter_path=str(embedded_path("gemray-tiny-dflash")),
        drafter_placement=placement,
        num_draft_tokens=8,
        max_step_tokens=128,
        lag=lag,
        prefill_chunk=50,
    )
    return Job(config, trained_requests())


def trained_requests() -> list[Submit]:
    greedy = held_out_requests(4, 28, longest_prompt=100)
    sampled = held_out_requests(2, 28, longest_prompt=100, temperature=0.5, seed=8)
    return greedy + [msgspec.structs.replace(s, request_id=f"{s.request_id} sampled") for s in sampled]


@functools.cache
def plain_ids(kind: Kind) -> dict[str, list[int]]:
    target = embedded_path("gemray-tiny") if kind == "trained" else tiny_checkpoint(kind)
    submits = trained_requests() if kind == "trained" else tiny_requests()
    run = run_engine(SoloCommunicator(), engine_config(target), submits)
    assert run is not None
    return run.ids


def job_of(kind: Kind, tp: int, placement: str, lag: int) -> Job:
    return trained_job(tp, placement, lag) if kind == "trained" else tiny_job(kind, tp, placement, lag=lag)


def serve_colocated(job: Job) -> tuple[Outcome, list[Round]]:
    rank = EngineRank(job.config, SoloCommunicator(), CPU)
    drafter = job.watched(rank._drafter)
    inbox = LocalInbox(job.submits)
    rank.engine(inbox, drafter=drafter).run()
    return Outcome.of(collect(inbox, job.submits)), drafter.rounds


def serve_dedicated(gang: TorchCommunicator, jobs: list[Job]) -> list[Any]:
    """On each rank of a gang of TP + 1, for each job: rank 0 has the outcome, the last rank its drafter's rounds."""
    torch.set_num_threads(1)
    comm = None
    answers: list[Any] = []
    for job in jobs:
        config = job.config
        if gang.rank == config.tensor_parallel_size:
            rank = DrafterRank(config, gang, CPU)
            rank.warm_up()
            drafter = job.watched(rank._drafter)
            rank.engine(drafter=drafter).run()
            answers.append(drafter.rounds)
            continue
        comm = comm or gang.subgroup(config.tensor_parallel_size, "target")
        target = EngineRank(config, comm, CPU, gang=gang)
        target.warm_up()
        inbox = LocalInbox(job.submits) if comm.rank == 0 else None
        target.engine(inbox).run()
        answers.append(None if inbox is None else Outcome.of(collect(inbox, job.submits)))
    return answers


def serve_padded(gang: TorchCommunicator, job: Job) -> Any:
    """As `serve_dedicated`, one job, in the shapes of graphs; every rank says how many cycles were padded."""
    config = job.config
    padded = functools.partial(PaddedCycle, max_num_seqs=config.max_num_seqs, num_draft_tokens=[5])
    if gang.rank == config.tensor_parallel_size:
        own = DrafterRank(config, gang, CPU)
        half = padded(own._cycle(own._drafter, own._slots))
        own._engine(half, own._drafter, own._slots).run()
        return None, half.num_padded, half.num_eager
    rank = EngineRank(config, gang.subgroup(config.tensor_parallel_size, "target"), CPU, gang=gang)
    parts = rank._parts(rank._drafter)
    cycle = padded(parts.cycle())
    inbox = LocalInbox(job.submits) if gang.rank == 0 else None
    rank._engine(parts, inbox, cycle).run()
    return None if inbox is None else Outcome.of(collect(inbox, job.submits)), cycle.num_padded, cycle.num_eager


@functools.cache
def colocated(kind: Kind) -> tuple[Outcome, list[Round]]:
    return serve_colocated(job_of(kind, 1, "colocated", lag=0))


def by_request(rounds: list[Round], job: Job, ids: dict[str, list[int]]) -> dict[str, list[Round]]:
    """Who runs beside whom may differ; what a request's rounds are may not. One that was in flight when the request met
    a stop id counts for nothing.
    """
    ends = {submit.request_id: len(submit.prompt_ids) + len(ids[submit.request_id]) for submit in job.submits}
    found: dict[str, list[Round]] = {}
    for r in rounds:
        if r.start + 1 >= ends[r.request_id]:
            continue
        found.setdefault(r.request_id, []).append(r)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ids_acceptance_and_drafts_equal_those_of_a_colocated_drafter(run_on_gang: RunOnGang, tp: int) -> None:
    kinds = KINDS[tp]
    jobs = [job_of(kind, tp, "dedicated", lag=(i + 1) % 2) for i, kind in enumerate(kinds)]
    lead, *others, drafter = run_on_gang(tp + 1, serve_dedicated, jobs)
    assert others == [[None] * len(jobs)] * (tp - 1)
    for kind, job, outcome, rounds in zip(kinds, jobs, lead, drafter, strict=True):
        expected, expected_rounds = colocated(kind)
        assert outcome.ids == expected.ids == plain_ids(kind)
        assert outcome.counters == expected.counters
        found = by_request(rounds, job, outcome.ids)
        assert found == by_request(expected_rounds, job, outcome.ids)
        check_acceptance(outcome, found)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_both_ends_pad_a_cycle_to_the_same_graph(run_on_gang: RunOnGang, tp: int) -> None:
    """What they exchange has the bucket's shapes, so each must find the same; prompts beyond the buckets have none."""
    lead, *others = run_on_gang(tp + 1, serve_padded, tiny_job("31B", tp, "dedicated"))
    outcome, num_padded, num_eager = lead
    assert others == [(None, num_padded, num_eager)] * tp
    assert outcome.ids == plain_ids("31B")
    assert min(num_padded, num_eager, outcome.total("accepted")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_ids_are_the_plain_ones_when_sequences_push_each_other_out(run_on_gang: RunOnGang, tp: int) -> None:
    """Short of pages a step may draft less, so rounds may differ; ids may not, and drafts go on being accepted."""
    shapes: tuple[Shape, ...] = ("31B", "26B-A4B")
    jobs = [tiny_job(shape, tp, "dedicated", is_memory_scarce=True, lag=lag) for lag, shape in enumerate(shapes)]
    lead, *_, drafter = run_on_gang(tp + 1, serve_dedicated, jobs)
    for shape, outcome, rounds in zip(shapes, lead, drafter, strict=True):
        assert outcome.ids == plain_ids(shape)
        assert outcome.preemptions > 0
        expected = {(r.request_id, r.start, len(r.drafts)): r for r in colocated(shape)[1]}
        common = [r for r in rounds if (r.request_id, r.start, len(r.drafts)) in expected]
        assert len(common) > 20
        assert all(r == expected[r.request_id, r.start, len(r.drafts)] for r in common)
        check_acceptance(outcome, by_request(rounds, jobs[0], outcome.ids))


def check_acceptance(outcome: Outcome, rounds: dict[str, list[Round]]) -> None:
    """Neither everything nor nothing is accepted, and full rounds follow each other."""
    assert 0.2 < outcome.total("accepted") / outcome.total("drafted") < 0.8
    assert {r.num_accepted for mine in rounds.values() for r in mine} >= {0, 1, 2, 3, 4, 5}
    assert longest_streak(rounds) >= 3


def longest_streak(rounds: dict[str, list[Round]]) -> int:
    """Most rounds of a request, one after the other, that accepted something."""
    longest = 0
    for mine in rounds.values():
        streak = 0
        for r in mine:
            streak = streak + 1 if r.num_accepted else 0
            longest = max(longest, streak)
    return longest


def test_an_mtp_assistant_cannot_leave_the_target() -> None:
    target = tiny_checkpoint("31B")
    config: dict[str, Any] = {"drafter_path": str(tiny_assistant(target)), "drafter_placement": "dedicated"}
    with pytest.raises(InvalidField, match="shares the target's KV cache"):
        EngineRank(engine_config(target, **config), SoloCommunicator(), CPU)


def test_a_placement_without_a_drafter_is_refused() -> None:
    with pytest.raises(InvalidField, match="there is no drafter"):
        engine_config(tiny_checkpoint("31B"), drafter_placement="dedicated")
