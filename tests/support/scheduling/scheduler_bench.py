"""A scheduler beside a fake engine, stepped by hand."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.messages import SequenceDelta, Submit
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.scheduling.outcome import SequenceOutcome
from gemray_workers.scheduling.plan import ScheduledRows, StepPlan
from gemray_workers.scheduling.scheduler import Scheduler, SchedulerConfig
from gemray_workers.scheduling.shares import Drafts
from support.scheduling.fake_engine import FakeEngine, token_at

MAX_LEN = 64
SPECS = [
    KVGroupSpec("sliding", (0,), 1, 8, 4, 8, torch.float32),
    KVGroupSpec("full", (1,), 1, 8, 4, None, torch.float32),
]
PLENTY = {"sliding": 200, "full": 200}


class Bench:
    """A scheduler and a fake engine, stepped by hand; with lag 1 a step is committed when the next one has run."""

    def __init__(self, num_pages: dict[str, int] | None = None, drafts: int = 0, **config: Any) -> None:
        settings: dict[str, Any] = {
            "max_num_seqs": 4,
            "max_step_tokens": 32,
            "prefill_chunk": 16,
            "max_model_len": MAX_LEN,
        }
        self.config = SchedulerConfig(**{**settings, "num_draft_tokens": drafts, "tells_freed_pages": True, **config})
        self.scheduler = Scheduler(self.config, SPECS, num_pages or PLENTY, lambda _sequence: Drafts(drafts))
        self.engine = FakeEngine(SPECS, max_model_len=self.config.max_model_len, prefix_cache=self.config.prefix_cache)
        self.in_flight: deque[tuple[StepPlan, list[SequenceOutcome]]] = deque()
        self.deltas: list[SequenceDelta] = []
        self.submits: dict[str, Submit] = {}

    def submit(self, request_id: str, prompt_len: int, max_tokens: int = 8, **params: Any) -> Submit:
        submit = request(request_id, prompt_len, max_tokens, **params)
        self.scheduler.submit(submit)
        self.submits[request_id] = submit
        return submit

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule() or StepPlan(step=self.scheduler.step)
        self.in_flight.append((plan, self.engine.run(plan)))
        while len(self.in_flight) > (self.config.lag if plan.scheduled else 0):
            self.deltas += self.scheduler.commit(*self.in_flight.popleft())
            self.scheduler.check_integrity()
        return plan

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def ids(self, request_id: str) -> list[int]:
        return [t for delta in self.deltas if delta.request_id == request_id for t in delta.token_ids]

    def final(self, request_id: str) -> SequenceDelta:
        (final,) = [d for d in self.deltas if d.request_id == request_id and d.finish is not None]
        return final

    @property
    def running(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.running]


def request(request_id: str, prompt_len: int, max_tokens: int = 8, **params: Any) -> Submit:
    emitted = params.pop("emitted_ids", [])
    num_prompt_logprobs = params.pop("num_prompt_logprobs", 0)
    cache_salt = params.pop("cache_salt", "")
    prompt_ids = params.pop("prompt_ids", list(range(prompt_len)))
    defaults: dict[str, Any] = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": sum(request_id.encode()),
    }
    return Submit(
        request_id=request_id,
        prompt_ids=prompt_ids,
        cache_salt=cache_salt,
        params=SamplingParams(**{**defaults, "max_tokens": max_tokens, **params}),
        emitted_ids=emitted,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def tokens_of(seed: int, first: int, end: int) -> list[int]:
    return [token_at(seed, position) for position in range(first, end)]


def rows_by_slot(plan: StepPlan) -> dict[int, ScheduledRows]:
    return {rows.slot: rows for rows in plan.scheduled}
