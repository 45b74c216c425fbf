"""Random plans of cycles that run kernel by kernel, within a scheduler's limits, with a liking for numbers at which
kernels change."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from gemray_workers.engine.buckets import BucketFinder, Key
from gemray_workers.execution.cycle_rows import CyclePlan
from gemray_workers.sampling.features import Features
from gemray_workers.scheduling.config import SchedulerConfig
from gemray_workers.scheduling.plan import ScheduledRows
from support.engine.engine_runner import request
from support.engine.random_requests import SAMPLERS

KINDS = tuple(Features.of(request("kind", [1], 8, **sampler).params) for sampler in SAMPLERS)


class _Sampling:
    """Stands for a `SamplingState` whose slots have these features between them."""

    def __init__(self, features: Features) -> None:
        self._features = features

    def features_of(self, _slots: Any) -> Features:
        return self._features


def plan_of(scheduled: Sequence[ScheduledRows], features: Features) -> CyclePlan:
    """The plan of a step whose sequences have these features between them."""
    return CyclePlan.of(scheduled, cast(Any, _Sampling(features)))


def uncaptured_plans(
    rng: random.Random, config: SchedulerConfig, num_draft_tokens: int, captured: Sequence[Key]
) -> Iterator[CyclePlan]:
    """Without end; each as it runs where no graph holds it.

    Args:
        rng: decides.
        config: limits.
        num_draft_tokens: most drafts of a sequence.
        captured: what graphs there are.
    """
    finder = BucketFinder(captured)
    while True:
        features = Features.union(rng.sample(KINDS, rng.randint(1, 3)))
        plan = plan_of(_scheduled(rng, config, num_draft_tokens), features)
        if finder.fit(plan) is plan:
            yield replace(plan, scheduled=[], features=plan.features.in_few_programs())


def _scheduled(rng: random.Random, config: SchedulerConfig, num_draft_tokens: int) -> list[ScheduledRows]:
    left, chunks = _near_power(rng, config.max_step_tokens), rng.choice((0.0, 0.0, 0.1, 0.5, 1.0))
    drafts = rng.choice((0, num_draft_tokens, None))
    scheduled: list[ScheduledRows] = []
    for slot in range(_near_power(rng, config.max_num_seqs)):
        if left <= 0:
            break
        if rng.random() < chunks:
            start = rng.choice((0, 0, rng.randrange(config.max_model_len)))
            known = min(left, _near_power(rng, config.prefill_chunk))
            rows = ScheduledRows(slot, start, known, 0, rng.random() < 0.5, 1 if rng.random() < 0.2 else None)
        else:
            asked = rng.randint(0, num_draft_tokens) if drafts is None else drafts
            rows = ScheduledRows(slot, rng.randrange(1, config.max_model_len), 1, min(asked, left - 1), True)
        scheduled.append(rows)
        left -= rows.num_known + rows.num_drafts
    return scheduled


def _near_power(rng: random.Random, most: int) -> int:
    """A power of two, or what is beside it or behind."""
    power = 1 << rng.randrange(most.bit_length() + 1)
    return max(1, min(most, power + rng.choice((-1, 0, 0, 1, rng.randrange(power)))))
