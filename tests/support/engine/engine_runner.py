"""Run requests through a whole engine on one rank or a gang of process ranks, without coordinator or Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from gemray_workers.config import EngineConfig
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.messages import SequenceDelta, SpeculationCounters, Submit
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.sampling.params import SamplingParams

GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}


def engine_config(model_path: Any, **changes: Any) -> EngineConfig:
    """Settings for tests: float64 on CPU, small steps."""
    settings: dict[str, Any] = {
        "model_path": str(model_path),
        "tensor_parallel_size": 1,
        "dtype": "float64",
        "device": "cpu",
        "kv_memory_bytes": 64 << 20,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_step_tokens": 64,
        "prefill_chunk": 64,
        "page_size": 4,
        "poison_freed_pages": True,
    }
    return EngineConfig(**{**settings, **changes})


def request(request_id: str, prompt_ids: list[int], max_tokens: int, **params: Any) -> Submit:
    """A request; greedy unless parameters say otherwise."""
    return Submit(
        request_id=request_id,
        prompt_ids=prompt_ids,
        params=SamplingParams(**{**GREEDY, "max_tokens": max_tokens, **params}),
    )


@dataclass
class Result:
    """What one request got."""

    ids: list[int] = field(default_factory=list)
    deltas: list[SequenceDelta] = field(default_factory=list)

    @property
    def last(self) -> SequenceDelta:
        return self.deltas[-1]


@dataclass
class Run:
    """What an engine did with a set of requests."""

    results: dict[str, Result]
    preemptions: int
    steps: int
    peak_pages: dict[str, int]
    speculation: SpeculationCounters
    """The sums over all requests."""

    @property
    def ids(self) -> dict[str, list[int]]:
        return {request_id: result.ids for request_id, result in self.results.items()}


def run_engine(comm: Communicator, config: EngineConfig, submits: list[Submit]) -> Run | None:
    """On every rank of a gang: load, serve `submits` to their end. Rank 0 returns the results."""
    torch.set_num_threads(1)
    rank = EngineRank(config, comm, torch.device("cpu"))
    return serve(rank, comm, submits)


def serve(rank: EngineRank, comm: Communicator, submits: list[Submit]) -> Run | None:
    """Serve `submits` on a loaded rank."""
    if comm.rank != 0:
        rank.engine(None).run()
        return None
    inbox = LocalInbox(submits)
    rank.engine(inbox).run()
    return collect(inbox, submits)


def collect(inbox: LocalInbox, submits: list[Submit]) -> Run:
    """What an engine gave, by request."""
    results = {s.request_id: Result() for s in submits}
    for delta in inbox.deltas:
        results[delta.request_id].ids += delta.token_ids
        results[delta.request_id].deltas.append(delta)
    groups = inbox.steps[-1].stats.pages_in_use
    return Run(
        results=results,
        preemptions=inbox.steps[-1].stats.num_preemptions,
        steps=len(inbox.steps),
        peak_pages={g: max(step.stats.pages_in_use[g] for step in inbox.steps) for g in groups},
        speculation=inbox.steps[-1].stats.speculation,
    )
