"""Serve cases on the ranks of a gang: requests come and go in the middle, and the gang fails and is built again."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from gemray_workers.config import EngineConfig
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.kv.block_table import most_pages
from gemray_workers.messages import Cancel, EngineStats, FromGang, SequenceDelta, StepOutput, Stop, Submit, ToGang
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.torch_communicator import TorchCommunicator
from gemray_workers.rank.drafter_rank import DrafterRank
from gemray_workers.rank.target_rank import EngineRank
from support.engine.engine_runner import engine_config
from support.engine.scripted_drafters import ScriptedDrafter, Texts
from support.engine.speculation_rig import gang_rig
from support.engine.switching import switching_drafters
from support.oracles.oracle import CPU
from support.random_cases.case import Case
from support.random_cases.scripts import mixed_script


@dataclass(frozen=True)
class Job:
    """A case with what the ranks cannot know by themselves."""

    case: Case
    directory: Path
    drafter_path: Path | None
    second_drafter_path: Path | None
    texts: Texts
    """What plain decoding gives, for scripts, going on behind stop ids where it can."""


@dataclass
class Life:
    """What one gang gave between its start and its end."""

    deltas: list[SequenceDelta]
    stats: EngineStats
    num_steps: int


@dataclass
class Served:
    """What a case's requests got, over all lives."""

    lives: list[Life] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    """Requests that got tokens after they had been cancelled."""
    cancelled: set[str] = field(default_factory=set)
    accepted: int = 0


class CaseInbox(LocalInbox):
    """The requests of one life, and what happens to them; its end cancels what is left."""

    def __init__(self, case: Case, submits: Sequence[Submit], since: int, end: int | None) -> None:
        """
        Args:
            case: when requests arrive and are cancelled.
            submits: those that have not ended in an earlier life, with what they got there.
            since: steps of the earlier lives.
            end: steps of this one, or None when it lasts until all have ended.
        """
        super().__init__(submits)
        self._case = case
        self._since = since
        self._end = end
        self._waiting = list(submits)
        self._got = {submit.request_id: len(submit.emitted_ids) for submit in submits}
        self.num_polls = 0
        self.ended_at_once: set[str] = set()
        self.cancelled: set[str] = set()
        self.leaked: list[str] = []

    def poll(self, timeout_s: float) -> list[ToGang]:
        """What has happened since the last step."""
        self.num_polls += 1
        if self._end is not None and self.num_polls > self._end:
            return [Stop()]
        now = self._since + self.num_polls
        idle = timeout_s > 0  # nothing runs: the next one comes now
        arrived = [s for s in self._waiting if idle or self._case.arrivals[s.request_id] < now]
        self._waiting = [s for s in self._waiting if s not in arrived]
        due = [
            name
            for name, count in self._case.cancels.items()
            if name in self._open and name not in self.cancelled and self._got[name] >= count
        ]
        due = [name for name in due if name not in {s.request_id for s in self._waiting}]
        self.cancelled |= set(due)
        messages: list[ToGang] = [*arrived, *(Cancel(name) for name in due)]
        return messages if messages or self._open else [Stop()]

    def send(self, message: FromGang) -> None:
        """Note who gets tokens although it has been cancelled."""
        super().send(message)
        assert isinstance(message, StepOutput)
        for delta in message.deltas:
            self._got[delta.request_id] += len(delta.token_ids)
            if delta.token_ids and delta.request_id in self.cancelled:
                self.leaked.append(delta.request_id)

    @property
    def finished(self) -> set[str]:
        """Requests that ended by themselves or were cancelled by their clients, not by the end of this life."""
        ends = {d.request_id: d.finish for d in self.deltas if d.finish is not None}
        return {name for name, finish in ends.items() if finish != "cancelled" or name in self.cancelled}


def serve_cases(comm: Any, jobs: Sequence[Job]) -> list[Served | None]:
    """On each rank of a gang, for cases of its size; rank 0 has what was served."""
    torch.set_num_threads(1)
    return [_serve(comm, job) for job in jobs]


def _serve(comm: Any, job: Job) -> Served | None:
    engines = _dedicated(comm, job) if job.case.drafter == "dedicated" else _colocated(comm, job)
    if comm.rank != 0:
        while comm.broadcast_bytes(None) == b"more":
            engines(None)
        return None
    served, submits, since = Served(), list(job.case.submits), 0
    ends: list[int | None] = [*job.case.ends, None]
    while submits:
        comm.broadcast_bytes(b"more")
        inbox = CaseInbox(job.case, submits, since, ends.pop(0))
        served.accepted += engines(inbox)
        since += inbox.num_polls
        served.lives.append(Life(inbox.deltas, inbox.steps[-1].stats, len(inbox.steps)))
        served.leaked += inbox.leaked
        served.cancelled |= inbox.cancelled
        submits = [_replayed(s, inbox) for s in submits if s.request_id not in inbox.finished]
    comm.broadcast_bytes(b"done")
    return served


def _replayed(submit: Submit, inbox: LocalInbox) -> Submit:
    """The request as the coordinator sends it again, with what had been given out."""
    given = [delta for delta in inbox.deltas if delta.request_id == submit.request_id]
    return msgspec.structs.replace(
        submit,
        emitted_ids=[*submit.emitted_ids, *inbox.token_ids(submit.request_id)],
        num_prompt_logprobs=submit.num_prompt_logprobs + sum(len(delta.prompt_logprobs or ()) for delta in given),
    )


def _colocated(comm: Communicator, job: Job) -> Any:
    """Serves one life on this rank; returns the drafts accepted."""
    limits, case = job.case.limits, job.case
    rig = gang_rig(
        comm,
        job.directory,
        drafter_path=job.drafter_path,
        second_drafter_path=job.second_drafter_path,
        num_draft_tokens=None if job.second_drafter_path else case.num_draft_tokens or None,
        dtype=getattr(torch, case.dtype),
        kv_dtype=case.kv_dtype,
        numerics=case.numerics,
    )
    rows = (1 + case.lag) * max(limits.prefill_chunk, 1 + case.num_draft_tokens)
    num_pages: Mapping[str, int] = {}
    if limits.spare_pages is not None:
        num_pages = {
            spec.name: most_pages(limits.max_model_len, spec.page_size, spec.window, rows) + limits.spare_pages
            for spec in rig.specs
        }

    def live(inbox: LocalInbox | None) -> int:
        drafter = ScriptedDrafter(mixed_script(job.texts), rig.drafter)
        engine = rig.engine(
            inbox,
            drafter=drafter,
            prefill_chunk=limits.prefill_chunk,
            max_step_tokens=limits.num_slots * (1 + case.num_draft_tokens) + limits.spare_rows,
            max_model_len=limits.max_model_len,
            num_pages=num_pages,
            num_slots=limits.num_slots,
            admission_headroom=limits.admission_headroom,
            padded=limits.padded,
            lag=case.lag,
            prefix_cache=case.prefix_cache,
        )
        with switching_drafters(rig.draft_tokens or {}) if case.drafter == "both" else nullcontext():
            engine.run()
        return sum(r.num_accepted for r in drafter.rounds)

    return live


def _dedicated(gang: TorchCommunicator, job: Job) -> Any:
    """The same with the drafter on the last rank, built by the gang's own ranks from a config."""
    config = _config(job)
    if gang.rank == config.tensor_parallel_size:
        own = DrafterRank(config, gang, CPU)

        def draft(_inbox: None) -> int:
            own.engine(drafter=ScriptedDrafter(mixed_script(job.texts), own._drafter)).run()
            return 0

        return draft
    rank = EngineRank(config, _target_ranks(gang, config.tensor_parallel_size), CPU, gang=gang)

    def live(inbox: LocalInbox | None) -> int:
        rank.engine(inbox).run()
        return 0 if inbox is None else inbox.steps[-1].stats.speculation.accepted

    return live


@functools.lru_cache(maxsize=4)
def _target_ranks(gang: TorchCommunicator, size: int) -> Any:
    return gang.subgroup(size, "target")


def _config(job: Job) -> EngineConfig:
    """Memory for all slots: scarce pages are the other drafters' part."""
    limits, case = job.case.limits, job.case
    return engine_config(
        job.directory,
        tensor_parallel_size=case.tp,
        drafter_path=str(job.drafter_path),
        drafter_placement="dedicated",
        num_draft_tokens=case.num_draft_tokens,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.num_slots,
        prefill_chunk=limits.prefill_chunk,
        max_step_tokens=limits.num_slots * (1 + case.num_draft_tokens) + limits.spare_rows,
        kv_memory_bytes=8 << 20,
        dtype=case.dtype,
        kv_dtype=case.kv_dtype,
        numerics=case.numerics,
        lag=case.lag,
    )
