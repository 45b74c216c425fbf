"""Histograms of steps, and waits for slots."""

from __future__ import annotations

import torch

from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.engine.observations import DistributionTally, QueueObserver, StepObserver
from gemray_workers.messages import BATCH_SIZE_BOUNDS, STEP_SECONDS_BOUNDS, Distribution, SequenceDelta
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.scheduling.plan import Admission, ScheduledRows, StepPlan
from support.checkpoints.tiny import tiny_checkpoint
from support.engine.engine_runner import engine_config, request

PARAMS = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, max_tokens=9)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plan(num_sequences: int) -> StepPlan:
    rows = [ScheduledRows(slot=slot, start=0, num_known=1, num_drafts=0, samples=True) for slot in range(num_sequences)]
    return StepPlan(step=1, scheduled=rows)


def test_values_are_counted_up_to_their_bound() -> None:
    tally = DistributionTally((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        tally.observe(value)
    assert tally.distribution() == Distribution(counts=[2, 1, 1], total=10.0)
    assert Distribution().plus(tally.distribution()) == tally.distribution()
    twice = tally.distribution().plus(tally.distribution())
    assert twice == Distribution(counts=[4, 2, 2], total=20.0)


def test_steps_without_rows_and_waits_for_work_take_no_time() -> None:
    clock = Clock()
    steps = StepObserver(clock)
    for now, num_sequences in ((10.0, 0), (20.0, 3), (20.5, 1)):
        clock.now = now
        steps.begin()
        clock.now += 0.25
        steps.commit(plan(num_sequences))
    seconds, sizes = steps.seconds.distribution(), steps.batch_sizes.distribution()
    assert (seconds.total, sum(seconds.counts)) == (0.5, 2)
    assert seconds.counts[STEP_SECONDS_BOUNDS.index(0.25)] == 2
    assert sizes == Distribution(counts=[1, 0, 1] + [0] * (len(BATCH_SIZE_BOUNDS) - 2), total=4.0)


def test_a_wait_is_told_once_with_the_first_delta() -> None:
    clock = Clock()
    queue = QueueObserver(clock)
    queue.arrive("a")
    queue.arrive("cancelled")
    clock.now = 2.0
    admitted = StepPlan(step=1, admitted=[Admission(0, "a", [1], 1, PARAMS, 0)])
    queue.admit(admitted)
    clock.now = 5.0
    queue.admit(admitted)  # again, after a preemption
    deltas = [
        SequenceDelta(request_id="a", token_ids=[1]),
        SequenceDelta(request_id="a", token_ids=[2]),
        SequenceDelta(request_id="cancelled", token_ids=[], finish="cancelled"),
    ]
    assert [queue.take_wait(delta) for delta in deltas] == [2.0, None, None]
    assert not queue._arrived
    assert not queue._waited


def test_an_engine_tells_them() -> None:
    inbox = LocalInbox([request("a", [5, 6, 7], 6), request("b", [8, 9], 3)])
    EngineRank(engine_config(tiny_checkpoint("31B")), SoloCommunicator(), torch.device("cpu")).engine(inbox).run()
    stats = inbox.steps[-1].stats
    assert sum(stats.batch_sizes.counts) == sum(stats.step_seconds.counts) == 6
    assert stats.batch_sizes.total == 6 + 3
    assert stats.step_seconds.total > 0
    for request_id in "ab":
        first, *rest = [delta for delta in inbox.deltas if delta.request_id == request_id]
        assert first.queue_seconds is not None
        assert not [delta for delta in rest if delta.queue_seconds is not None]
