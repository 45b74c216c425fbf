"""Ways that are to run out of pages on cards do so, as their schedulers show without a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.scheduling.outcome import SequenceOutcome
from gemray_workers.scheduling.plan import StepPlan
from gemray_workers.scheduling.scheduler import Scheduler
from gemray_workers.scheduling.shares import Drafts
from support.engine.exact_kinds import (
    KINDS,
    MAX_TOKENS,
    NUM_CASES,
    NUM_CASES_OF_TWO,
    exact_config,
    exact_requests,
    exact_ways,
)
from support.engine.exact_runs import Got, Way, schedule_of
from support.scheduling.fake_engine import FakeEngine


class UncheckedEngine(FakeEngine):
    """Does not look at the pages, which is slow for long prompts: preemptions alone are counted here."""

    def _owners(self, slot: object, text: list[int]) -> list[str | int]:
        return [0] * len(text)

    def _write(self, *_: object) -> None:
        """Keeps nothing."""

    def _check_keys(self, *_: object) -> None:
        """Looks at nothing."""

    def _check_draft_keys(self, *_: object) -> None:
        """Looks at nothing."""


def preemptions(blueprint: Blueprint, way: Way, num_accepted: Callable[[int], int]) -> int:
    """How often a request of a way loses its pages when `num_accepted(n)` of n drafts are right."""
    schedule = schedule_of(blueprint, way)
    config = schedule.config
    scheduler = Scheduler(config, schedule.specs, schedule.num_pages, lambda _: Drafts(config.num_draft_tokens))
    engine = UncheckedEngine(
        schedule.specs,
        lambda _request, _position, num_drafts: num_accepted(num_drafts),
        max_model_len=config.max_model_len,
        prefix_cache=config.prefix_cache,
    )
    for submit in way.submits:
        scheduler.submit(submit)
    in_flight: deque[tuple[StepPlan, list[SequenceOutcome]]] = deque()
    while scheduler.has_work:
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append((plan, engine.run(plan)))
        most = config.lag if plan is not None and plan.scheduled else 0
        while len(in_flight) > most:
            scheduler.commit(*in_flight.popleft())
    return scheduler.stats(0.0).num_preemptions


@pytest.mark.parametrize(("tp", "num_cases"), [(1, NUM_CASES), (2, NUM_CASES_OF_TWO)])
@pytest.mark.parametrize("name", KINDS)
def test_pages_run_out(name: str, tp: int, num_cases: int, tmp_path: Path) -> None:
    """Counts preemptions with no draft accepted, and with all of them."""
    kind = KINDS[name]
    blueprint = Blueprint.of(exact_config(kind, tmp_path, drafters=True, tensor_parallel_size=tp))
    submits = exact_requests(kind)
    alone = {submit.request_id: Got((4,) * MAX_TOKENS, (), ()) for submit in submits}
    scarce = [way for way in exact_ways(kind, submits, alone, tp=tp, num_cases=num_cases) if way.scarce]
    for num_accepted in (lambda _: 0, lambda num_drafts: num_drafts):
        found = [preemptions(blueprint, way, num_accepted) for way in scarce]
        assert sum(found) > 0, found
