"""Speculation is lossless on 2 and 4 ranks: k and block sizes, chunks, preemption, outputs across the windows.

All jobs of a TP size are served by one gang. Two of three rounds have a script's drafts verified instead of the
drafter's own, so that drafts of random weights are accepted, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gemray_workers.messages import Submit
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from support.checkpoints.tiny import WINDOW, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.random_requests import MAX_MODEL_LEN, random_requests, scarce_pages, short_chunks
from support.engine.scripted_drafters import Round, Texts, plain_texts
from support.engine.speculation_rig import Rig, solo_rig
from support.oracles.oracle import load_model, solo_model
from support.processes.gang import RunOnGang

from .test_speculation_ids import NUM_DRAFT_TOKENS, drafter_path, drive

MAX_TOKENS = 32


def very_scarce_pages(seed: int, rig: Rig) -> dict[str, Any]:
    """Pages for one sequence of full length: a few requests push each other out."""
    limits = scarce_pages(seed, rig)
    return {**limits, "num_pages": {name: pages * 9 // 10 for name, pages in limits["num_pages"].items()}}


SITUATIONS = {"chunks": short_chunks, "scarce": very_scarce_pages}


@dataclass(frozen=True)
class Job:
    """One engine: a target, a drafter, how much it may draft, and under which limits it serves."""

    shape: Shape
    drafter: str
    num_draft_tokens: int
    situation: str
    seed: int
    directory: Path
    path: Path | None
    submits: list[Submit]
    texts: Texts
    """What plain decoding gives, for scripts."""
    lag: int

    def limits(self, rig: Rig) -> dict[str, Any]:
        """Keyword arguments of `Rig.run`."""
        if self.situation in SITUATIONS:
            return {**SITUATIONS[self.situation](self.seed, rig), "lag": self.lag}
        return {"prefill_chunk": 16, "max_model_len": MAX_MODEL_LEN, "num_slots": 8, "lag": self.lag}

    @property
    def plain_ids(self) -> dict[str, list[int]]:
        """What plain decoding puts behind the prompts."""
        return {s.request_id: list(self.texts[s.request_id][len(s.prompt_ids) :]) for s in self.submits}


@dataclass(frozen=True)
class Served:
    """What a job gave on one rank."""

    rounds: list[Round]
    ids: dict[str, list[int]] | None = None
    """On rank 0, like the next two."""
    accepted: int = 0
    preemptions: int = 0


def job(
    shape: Shape,
    drafter: str,
    most: int,
    situation: str,
    seed: int,
    *,
    path: Path | None = None,
    count: int = 6,
    max_tokens: int = MAX_TOKENS,
    lag: int = 1,
) -> Job:
    directory = tiny_checkpoint(shape)
    path = drafter_path(directory, drafter) if path is None else path
    submits = random_requests(seed, count, num_draft_tokens=most, max_tokens=max_tokens)
    ids = solo_rig(directory).run(submits, max_model_len=MAX_MODEL_LEN).ids
    return Job(shape, drafter, most, situation, seed, directory, path, submits, plain_texts(submits, ids), lag)


def serve_speculating(comm: Communicator, jobs: list[Job]) -> list[Served]:
    """On each rank, for each job; a target is loaded once."""

    @functools.cache
    def model_in(directory: Path) -> TargetModel:
        return solo_model(directory) if comm.size == 1 else load_model(directory, comm, torch.float64)

    found = []
    for job in jobs:
        model = model_in(job.directory)
        rig = Rig(
            model,
            job.directory,
            drafter_path=job.path,
            num_draft_tokens=job.num_draft_tokens,
            comm=comm,
            num_pages=256,
        )
        scripted = drive(rig, job.drafter, job.texts)
        if comm.rank == 0:
            run = rig.run(job.submits, drafter=scripted, **job.limits(rig))
            found.append(Served(scripted.rounds, run.ids, run.speculation.accepted, run.preemptions))
        else:
            rig.engine(None, drafter=scripted, **job.limits(rig)).run()
            found.append(Served(scripted.rounds))
    return found


@pytest.mark.slow
def test_ids_and_drafts_do_not_depend_on_tensor_parallelism(run_on_gang: RunOnGang) -> None:
    """On 1, 2 and 4 ranks: the ids are the plain ones, and every rank proposes the same drafts."""
    kinds: list[tuple[Shape, str]] = [
        ("E2B", "mtp-centroids"),
        ("E4B", "dflash"),
        ("12B", "mtp"),
        ("26B-A4B", "mtp"),
        ("31B", "dflash"),
        ("31B", "scripted"),
    ]
    jobs = [
        job(shape, drafter, NUM_DRAFT_TOKENS[drafter], "plenty", 3, count=9, max_tokens=10, lag=(i + 1) % 2)
        for i, (shape, drafter) in enumerate(kinds)
    ]
    solo = serve_speculating(SoloCommunicator(), jobs)
    assert [served.ids for served in solo] == [job.plain_ids for job in jobs]
    for tp, some in ((2, slice(None)), (4, slice(None, 4))):
        lead, *followers = run_on_gang(tp, serve_speculating, jobs[some])
        assert lead == solo[some]
        for follower in followers:
            assert [served.rounds for served in follower] == [served.rounds for served in solo[some]]


def sweep(ks: list[int], blocks: list[int], first_seed: int) -> Iterator[Job]:
    """These k of MTP and block sizes of DFlash, in turn in small chunks and with scarce pages."""
    mtp_shapes: tuple[Shape, ...] = ("E4B", "12B", "26B-A4B")
    dflash_shapes: tuple[Shape, ...] = ("31B", "26B-A4B")
    for i, k in enumerate(ks):
        directory = tiny_checkpoint(mtp_shapes[i % 3])
        path = tiny_assistant(directory, centroids=bool(i % 2))
        yield job(mtp_shapes[i % 3], "mtp", k, ("scarce", "chunks")[i % 2], first_seed + i, path=path, lag=i // 2 % 2)
    for i, block_size in enumerate(blocks):
        directory = tiny_checkpoint(dflash_shapes[i % 2])
        path = tiny_dflash(directory, block_size=block_size)
        situation = ("scarce", "chunks")[i // 2 % 2]
        seed = first_seed + 50 + i
        yield job(dflash_shapes[i % 2], "dflash", block_size - 1, situation, seed, path=path, lag=(i + 1) % 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "ks", "blocks"),
    [(2, [1, 2, 4, 8], [2, 5, 16]), (4, [5], [9])],
    ids=["tp2", "tp4"],
)
def test_ids_for_many_k_and_block_sizes(run_on_gang: RunOnGang, tp: int, ks: list[int], blocks: list[int]) -> None:
    jobs = list(sweep(ks, blocks, first_seed=1000 * tp))
    lead, *followers = run_on_gang(tp, serve_speculating, jobs)
    for i, (job, served) in enumerate(zip(jobs, lead, strict=True)):
        assert served.ids == job.plain_ids
        assert served.accepted > 0
        assert max(r.num_accepted for r in served.rounds) >= min(job.num_draft_tokens, 3)
        assert job.situation == "scarce" or served.preemptions == 0
        assert all(follower[i].rounds == served.rounds for follower in followers)
    assert sum(served.preemptions for served in lead) > 0
    ends = [(len(s.prompt_ids), len(job.texts[s.request_id])) for job in jobs for s in job.submits]
    for edge in (WINDOW, 2 * WINDOW, *((MAX_MODEL_LEN - 1,) if tp == 2 else ())):
        assert any(prompt <= edge < end for prompt, end in ends), "outputs cross the windows' edges and meet the limit"
